"""Kahneman-Tversky optimisation: a loss over single answers with labels (Ethayarajh et al. 2024, arXiv 2402.01306).

Losses have the dtype of the log ratios.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class KtoPolicy:
    """beta: factor of the log ratios to the reference. desirable_weight, undesirable_weight: factors of the losses of either label.

    Raises:
        ValueError: a number out of its range.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"dpo.beta={self.beta}: must be above 0")
        for name in ("desirable_weight", "undesirable_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"dpo.{name}={getattr(self, name)}: must be 0 or more")


def kto_losses(log_ratios: Tensor, *, labels: Tensor, kl: Tensor, policy: KtoPolicy) -> Tensor:
    """Returns the loss of every answer: log ratios to the reference [P], labels bool [P] -> [P].

    kl: the mean log ratio of answers to other prompts, a scalar without gradient; negative values are taken as 0.
    """
    signs = torch.where(labels, 1.0, -1.0).to(log_ratios)
    weights = torch.where(labels, policy.desirable_weight, policy.undesirable_weight).to(log_ratios)
    return weights * (1 - torch.sigmoid(policy.beta * signs * (log_ratios - kl.clamp(min=0))))
