"""The loss of a causal transformers model in the main job."""

from typing import Any

from torch import Tensor

from ztk.kernels import cross_entropy
from ztk.nn.loss import IGNORED


def causal_loss(model: Any, *, logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross entropy of logits [B, T, V] and targets [B, T], an fp32 scalar. Targets of -100 are ignored.

    In training mode, adds the mean of logsumexp(logits)^2 with the model's weight `z_loss`, as `ztk.nn.loss.LanguageLoss` does.
    """
    z_loss = getattr(model, "z_loss", 0.0) if model.training else 0.0
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, z_loss=z_loss)
