"""Corrects for answers sampled by another forward than the trainer's: importance weights, and the distance between both."""

from dataclasses import dataclass

import torch
from torch import Tensor

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
