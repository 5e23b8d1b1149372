"""A convolutional language model on tokens, with an own loss: `model=conv loss=smooth`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvLM(nn.Module):
    """Causal convolutions with residuals. tokens int64 [B, T] -> logits [B, T, vocab_size]."""

    def __init__(self, *, width: int, kernel: int = 5, layers: int = 2, vocab_size: int = 256) -> None:
        super().__init__()
        self.kernel = kernel
        self.embedding = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, kernel) for _ in range(layers))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).transpose(1, 2)
        for layer in self.layers:
            x = x + torch.relu(layer(F.pad(x, (self.kernel - 1, 0))))
        return self.head(x.transpose(1, 2))


def smooth_loss(logits: Tensor, targets: Tensor, smoothing: float = 0.1) -> Tensor:
    """Cross entropy with label smoothing."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), label_smoothing=smoothing)
