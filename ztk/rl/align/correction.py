"""Answers that another forward has drawn than the one that learns from them."""

from torch import Tensor


def importance_weights(logprobs: Tensor, *, drawn: Tensor, most: float) -> Tensor:
    """Truncated importance sampling (Ionides 2008, https://doi.org/10.1198/106186008X320456): the ratio of the trainer's probability of a
    token to that with which it was drawn, at most `most`. Tensors of one shape, such as [T], float32 -> the same."""
    return (logprobs - drawn).exp().clamp(max=most)
