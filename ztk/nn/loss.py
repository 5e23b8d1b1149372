"""From logits to the loss."""

from torch import Tensor, nn

from ztk.kernels import cross_entropy

IGNORED = -100  # a target that does not count, as in torch


class LanguageLoss(nn.Module):
    """logits [B, T, V] -> the same logits, or with targets [B, T] their mean cross entropy (float32 scalar). Targets of -100 do not count."""

    def forward(self, logits: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return logits
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, inplace=True)
