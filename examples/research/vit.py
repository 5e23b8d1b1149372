"""A vision transformer on images, from an own Dataset: `model=vit data=bars`. The model returns its loss."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset


class Bars(Dataset):
    """Noisy images [1, size, size] with a horizontal or a vertical bar, and the class, 0 or 1."""

    def __init__(self, *, count: int = 512, size: int = 16, seed: int = 0) -> None:
        self.count, self.size, self.seed = count, size, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        image = 0.3 * torch.randn(1, self.size, self.size, generator=generator)
        label, place = index % 2, int(torch.randint(self.size, (1,), generator=generator))
        image[0, place, :] += 1.0 - label
        image[0, :, place] += label
        return {"image": image, "label": torch.tensor(label)}

    def held_out(self) -> "Bars":
        """Images that no training step has."""
        return Bars(count=64, size=self.size, seed=self.seed + 1)


class VisionTransformer(nn.Module):
    """Patches of an image as a sequence. forward(batch) returns the loss."""

    def __init__(self, *, size: int = 16, patch: int = 4, width: int = 32, layers: int = 2, classes: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.places = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.patches(batch["image"].to(self.places.dtype)).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean(1)).float(), batch["label"])
