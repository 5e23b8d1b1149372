"""The loss of a causal model of transformers in the main job."""

from typing import Any

from torch import Tensor

from ztk.kernels import cross_entropy
from ztk.nn.loss import IGNORED


def causal_loss(model: Any, *, logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy of logits [B, T, V] and targets [B, T], fp32 scalar; targets of -100 do not count. In training mode with the
    model's `z_loss` as weight of the mean of logsumexp(logits)^2, as `ztk.nn.loss.LanguageLoss` has it."""
    z_loss = getattr(model, "z_loss", 0.0) if model.training else 0.0
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, z_loss=z_loss)
