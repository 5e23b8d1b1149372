"""Advantages of answers and tokens, and corrections for answers that another forward than the trainer's sampled."""

from dataclasses import dataclass

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


OUTSIDE = (0.9, 1.1)  # bounds outside of which probability ratios are counted


def importance_weights(logprobs: Tensor, *, drawn: Tensor, mask: Tensor, form: str, most: float) -> Tensor:
    """Returns the ratio r of the trainer's to the sampler's probability of tokens, float32 [S, T]; 1 outside `mask`, bool [S, T].

    form: the level (token or sequence; the latter assigns an answer's ratio to all its tokens) and the treatment of ratios above `most`.
    token_truncate, sequence_truncate: min(r, most) (Ionides 2008, https://doi.org/10.1198/106186008X320456). token_mask, sequence_mask:
    0, which excludes the token or answer.
    """
    level, _, above = form.partition("_")
    log_ratio = torch.where(mask, logprobs - drawn, 0.0)
    if level == "sequence":
        log_ratio = torch.where(mask, log_ratio.sum(-1, keepdim=True), 0.0)
    ratio = log_ratio.exp()
    return ratio.clamp(max=most) if above == "truncate" else torch.where(ratio > most, 0.0, ratio)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """The distance of the sampler from the trainer. r is the trainer's probability of a token divided by the sampler's.

    k1: mean of -log r. k3: mean of r - 1 - log r. Both estimate the divergence in nats per token. perplexity: mean over answers of the
    ratio of the trainer's to the sampler's perplexity. outside: fraction of the tokens with r outside `OUTSIDE`.
    """

    k1: float
    k3: float
    perplexity: float
    outside: float

    @classmethod
    def of(cls, sums: Tensor) -> "Mismatch":
        """Computes the distance from `mismatch_sums`, added up over ranks: float64 [6]."""
        k1, k3, outside, tokens, perplexity, answers = sums.tolist()
        tokens, answers = max(1.0, tokens), max(1.0, answers)
        return cls(k1=k1 / tokens, k3=k3 / tokens, perplexity=perplexity / answers, outside=outside / tokens)


def mismatch_sums(logprobs: Tensor, *, drawn: Tensor, mask: Tensor) -> Tensor:
    """Returns sums for `Mismatch` over the tokens of `mask`, bool [S, T]: float64 [6]. logprobs: the trainer's; drawn: the sampler's; [S,
    T].
    """
    log_ratio = torch.where(mask, logprobs.double() - drawn.double(), 0.0)
    ratio, lengths = log_ratio.exp(), mask.sum(1)
    outside = ((ratio < OUTSIDE[0]) | (ratio > OUTSIDE[1])) & mask
    perplexity = (-log_ratio.sum(1) / lengths.clamp(min=1)).exp()[lengths > 0]
    k3 = (log_ratio.expm1() - log_ratio).sum()
    parts = (-log_ratio.sum(), k3, outside.sum(), lengths.sum(), perplexity.sum(), (lengths > 0).sum())
    return torch.stack([part.double() for part in parts])
