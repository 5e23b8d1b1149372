"""Generalised knowledge distillation: a loss between the next-token distributions of student and teacher (Agarwal et al. 2023, arXiv
2306.13649).
"""

import math

import torch
from torch import Tensor

from ztk.core.policies.align import DistillPolicy


def distill_losses(student: Tensor, *, teacher: Tensor, policy: DistillPolicy) -> Tensor:
    """Returns the divergence of every token in nats, from logits [N, V] of both: [N] in float32, float64 for float64.

    With m = (1 - beta) student + beta teacher it is beta KL(teacher, m) + (1 - beta) KL(student, m).
    """
    own, theirs = (_logprobs(logits, temperature=policy.temperature) for logits in (student, teacher))
    if policy.beta == 0:
        return _divergence(theirs, own)
    if policy.beta == 1:
        return _divergence(own, theirs)
    mixed = torch.logaddexp(own + math.log1p(-policy.beta), theirs + math.log(policy.beta))
    return policy.beta * _divergence(theirs, mixed) + (1 - policy.beta) * _divergence(own, mixed)


def _logprobs(logits: Tensor, *, temperature: float) -> Tensor:
    precise = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(precise if temperature == 1.0 else precise / temperature, dim=-1)


def _divergence(first: Tensor, second: Tensor) -> Tensor:
    """Returns KL(first, second) of log-probabilities [N, V]: [N]."""
    return (first.exp() * (first - second)).sum(-1)
