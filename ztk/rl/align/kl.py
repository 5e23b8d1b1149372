"""Per-token estimates of the KL divergence between a policy and its reference."""

import torch
from torch import Tensor


def divergence(logprobs: Tensor, *, reference: Tensor, old: Tensor, estimator: str) -> Tensor:
    """Estimates KL(policy, reference) per token with one of Schulman's estimators (http://joschu.net/blog/kl-approx.html): tensors of the
    same shape, such as [T], and floating-point dtype -> the same.

    k3_weighted multiplies k3 by the ratio to the sampling policy, which makes its gradient unbiased.
    """
    log_ratio = logprobs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    k3 = torch.expm1(-log_ratio) + log_ratio
    return k3 * (logprobs - old).exp() if estimator == "k3_weighted" else k3
