"""The loss of a critic."""

import torch
from torch import Tensor


def value_loss(values: Tensor, *, old: Tensor, returns: Tensor, clip: float, weights: Tensor) -> Tensor:
    """Half the squared error of values, which may move by `clip` from the old ones (0: freely): [T] each, or another shape,
    float32 or float64 -> a weighted sum, a scalar."""
    error = (values - returns).square()
    if clip:
        error = torch.maximum(error, (old + (values - old).clamp(-clip, clip) - returns).square())
    return (error * weights).sum() / 2
