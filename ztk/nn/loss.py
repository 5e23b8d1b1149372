"""From logits to the loss."""

from torch import Tensor, nn

from ztk.data.borders import IGNORED
from ztk.kernels import cross_entropy

__all__ = ["IGNORED", "LanguageLoss"]


class LanguageLoss(nn.Module):
    """logits [B, T, V] -> the same logits, or with targets [B, T] their mean cross entropy (float32 scalar). Targets of -100 do not count.

    z_loss: in training mode the loss also has z_loss * the mean of logsumexp(logits)^2 over targets that count, which keeps logits from
    drifting (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, whose weight is 1e-4). In eval mode it is the cross entropy alone.
    """

    def __init__(self, *, z_loss: float = 0.0) -> None:
        super().__init__()
        self.z_loss = z_loss

    def forward(self, logits: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return logits
        z_loss = self.z_loss if self.training else 0.0
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, z_loss=z_loss, inplace=True)
