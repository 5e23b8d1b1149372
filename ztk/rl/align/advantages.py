"""Advantages of answers and tokens."""

import torch
from torch import Tensor

from ztk.kernels import segment_scan


def group_advantages(rewards: Tensor, *, groups: Tensor, included: Tensor, baseline: str, scale: str) -> Tensor:
    """Compares rewards within groups: float64 [S], int64 [S], bool [S] -> float64 [S], 0 for excluded samples.

    baseline: mean (Shao et al. 2024, arXiv 2402.03300) or leave_one_out (Ahmadian et al. 2024, arXiv 2402.14740). scale: group divides by
    the group's standard deviation plus 1e-4, batch by the standard deviation of all advantages, none does not divide.
    """
    numbers = groups.unique(return_inverse=True)[1]
    weight = included.double()
    totals = torch.zeros(int(numbers.max()) + 1, 2, dtype=torch.float64)
    totals.index_add_(0, numbers, torch.stack([weight, weight * rewards], dim=1))
    count, total = totals[numbers].unbind(1)
    mean = total / count.clamp(min=1)
    if baseline == "leave_one_out":
        others = (count - 1).clamp(min=1)
        advantages = torch.where(count > 1, rewards - (total - rewards) / others, 0.0)
    else:
        advantages = rewards - mean
    if scale == "group":
        # Squares of differences: squares of the rewards themselves would lose a relative spread of 1e-8.
        squares = torch.zeros(len(totals), dtype=torch.float64)
        squares.index_add_(0, numbers, weight * (rewards - mean).square())
        deviation = (squares[numbers] / (count - 1).clamp(min=1)).sqrt()
        advantages = advantages / (deviation + 1e-4)
    advantages = advantages * weight
    if scale == "batch":
        kept = advantages[included]
        advantages = advantages / (kept.std(unbiased=False) + 1e-8 if len(kept) else 1.0)
    return advantages


def equal_groups(rewards: Tensor, *, groups: Tensor, included: Tensor) -> Tensor:
    """Returns bool [S]: whether all samples of the group with a reward have the same one."""
    numbers = groups.unique(return_inverse=True)[1]
    size = int(numbers.max()) + 1
    highest = torch.full((size,), -torch.inf, dtype=torch.float64)
    lowest = torch.full((size,), torch.inf, dtype=torch.float64)
    highest = highest.scatter_reduce(0, numbers[included], rewards[included], reduce="amax")
    lowest = lowest.scatter_reduce(0, numbers[included], rewards[included], reduce="amin")
    return (highest <= lowest)[numbers]


def generalised_advantages(rewards: Tensor, *, values: Tensor, lengths: Tensor, gamma: float, lam: float) -> Tensor:
    """Computes GAE (Schulman et al. 2016, arXiv 1506.02438) over packed answers: float32 or float64 [T] each, lengths int64 [S] -> [T].

    values: value of the state before each token. After the last token of an answer the value is 0.
    """
    return segment_scan(rewards, values, lengths, gamma=gamma, lam=lam)
