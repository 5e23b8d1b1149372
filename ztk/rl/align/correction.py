"""Answers drawn by another forward than the trainer's: weights of the loss, and the distance between the two."""

from dataclasses import dataclass

import torch
from torch import Tensor

OUTSIDE = (0.9, 1.1)  # ratios of probabilities that are counted as far from 1


def importance_weights(logprobs: Tensor, *, drawn: Tensor, mask: Tensor, form: str, most: float) -> Tensor:
    """The ratio r of the trainer's probability to that with which tokens were drawn, float32 [S, T]; 1 outside of `mask`, bool [S, T].

    form: the ratio of a token, or of an answer for each of its tokens, and what happens above `most`. token_truncate, sequence_truncate: min(r,
    most) (Ionides 2008, https://doi.org/10.1198/106186008X320456). token_mask, sequence_mask: 0, so that the token or answer does not count.
    """
    level, _, above = form.partition("_")
    log_ratio = torch.where(mask, logprobs - drawn, 0.0)
    if level == "sequence":
        log_ratio = torch.where(mask, log_ratio.sum(-1, keepdim=True), 0.0)
    ratio = log_ratio.exp()
    return ratio.clamp(max=most) if above == "truncate" else torch.where(ratio > most, 0.0, ratio)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """The distance of the draws from the trainer. r is the trainer's probability of a token divided by the probability of its draw.

    k1: mean of -log r; k3: mean of r - 1 - log r; both estimate the divergence of the two in nats per token. perplexity: mean over answers of
    the trainer's perplexity divided by the perplexity of the draw. outside: fraction of the tokens with r outside of `OUTSIDE`.
    """

    k1: float
    k3: float
    perplexity: float
    outside: float

    @classmethod
    def of(cls, sums: Tensor) -> "Mismatch":
        """From the sums of `mismatch_sums`, added up over ranks: float64 [6]."""
        k1, k3, outside, tokens, perplexity, answers = sums.tolist()
        tokens, answers = max(1.0, tokens), max(1.0, answers)
        return cls(k1=k1 / tokens, k3=k3 / tokens, perplexity=perplexity / answers, outside=outside / tokens)


def mismatch_sums(logprobs: Tensor, *, drawn: Tensor, mask: Tensor) -> Tensor:
    """Sums for `Mismatch` over the tokens of `mask`, bool [S, T], float64 [6]. logprobs: the trainer's; drawn: the draws'; [S, T]."""
    log_ratio = torch.where(mask, logprobs.double() - drawn.double(), 0.0)
    ratio, lengths = log_ratio.exp(), mask.sum(1)
    outside = ((ratio < OUTSIDE[0]) | (ratio > OUTSIDE[1])) & mask
    perplexity = (-log_ratio.sum(1) / lengths.clamp(min=1)).exp()[lengths > 0]
    k3 = (log_ratio.expm1() - log_ratio).sum()
    parts = (-log_ratio.sum(), k3, outside.sum(), lengths.sum(), perplexity.sum(), (lengths > 0).sum())
    return torch.stack([part.double() for part in parts])
