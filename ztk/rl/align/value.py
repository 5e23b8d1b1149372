"""The loss of a critic."""

import torch
from torch import Tensor


def value_loss(values: Tensor, *, old: Tensor, returns: Tensor, clip: float, weights: Tensor) -> Tensor:
    """Returns half the squared error of values: [T] each, or another shape, float32 or float64 -> a weighted sum, a scalar.

    clip: largest change from the old values; 0 for no limit.
    """
    error = (values - returns).square()
    if clip:
        error = torch.maximum(error, (old + (values - old).clamp(-clip, clip) - returns).square())
    return (error * weights).sum() / 2
