"""The language model's loss."""

import torch
from torch import Tensor, nn

from ztk.core.runtime.own_forward import has_own_forward
from ztk.data.borders import IGNORED
from ztk.kernels import bytes_kept, cross_entropy, linear_cross_entropy
from ztk.nn.linear import Linear, is_autocast

LARGE_LOGITS = 1 << 30  # bytes: for smaller logits, the loss uses the head's logits

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

    def of_head(self, head: nn.Module, *, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Returns `forward` of the logits `head(x)`, x [B, T, C]. If they would take more than `LARGE_LOGITS` bytes and more than the op keeps,
        the loss is computed from the head's weight in chunks of tokens (`ztk.kernels.linear_cross_entropy`), without storing the logits.
        """
        if targets is None or not self._is_large(head, x=x):
            return self(head(x), targets)
        z_loss = self.z_loss if self.training else 0.0
        return linear_cross_entropy(x, head.weight, targets, ignore_index=IGNORED, z_loss=z_loss)

    @staticmethod
    def _is_large(head: nn.Module, *, x: Tensor) -> bool:
        """Whether to compute the loss in chunks. Requires a plain product with a trained weight: no adapter, no deferred gradient, and no
        autocast to 16 bits, which the op does not support."""
        if type(head) is not Linear or head.bias is not None or has_own_forward(head) or is_autocast(x.device):
            return False
        nbytes = x.numel() // head.in_features * head.out_features * x.element_size()
        if nbytes <= LARGE_LOGITS or not head.weight.requires_grad:
            return False
        return nbytes > bytes_kept(x, weight=head.weight, with_gradients=torch.is_grad_enabled())
