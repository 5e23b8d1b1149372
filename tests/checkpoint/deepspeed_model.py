"""A model small enough to keep checkpoints of it: odd sizes, a tied head, a frozen parameter. Plain torch."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES, WIDTH, BATCH, LENGTH = 10, 8, 4, 6
SAVED_STEPS, ALL_STEPS = 3, 8  # the checkpoint is taken after SAVED_STEPS steps


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.up = nn.Linear(WIDTH, 13)
        self.down = nn.Linear(13, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=False)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.down(F.gelu(self.up(x))) * self.scale
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.roll(1, dims=1).flatten())


def tokens_of(step: int) -> Tensor:
    """The global batch of a step: int64 [BATCH, LENGTH]."""
    return torch.randint(CLASSES, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
