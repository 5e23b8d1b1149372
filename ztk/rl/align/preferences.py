"""Losses over preferences: for reward models over pairs of sequences, for direct preference optimisation over log-probabilities of chosen and
rejected answers, and of Kahneman-Tversky optimisation over single answers with labels.

Losses have the dtype of the log-probabilities. Losses of reward models are float32, or float64 for float64 values.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ztk.core.policies.align import DpoPolicy
from ztk.core.policies.reward import PairwisePolicy
from ztk.rl.align.sequences import Sequences, segment_sums


@dataclass(frozen=True, kw_only=True, slots=True)
class PairLosses:
    """losses: one per pair, [P]. chosen, rejected: the rewards of the answers without a gradient, [P]."""

    losses: Tensor
    chosen: Tensor
    rejected: Tensor


def last_values(values: Tensor, *, sequences: Sequences) -> Tensor:
    """Returns values [T] at the last token of every sequence: [S], float64 for float64, else float32."""
    values = values if values.dtype == torch.float64 else values.float()
    return values.index_select(0, sequences.ends)


def pairwise_losses(
    values: Tensor, *, sequences: Sequences, policy: PairwisePolicy, margins: Tensor | None = None
) -> PairLosses:
    """Returns the loss of every pair and the values at the last tokens, from values [T] of 2P sequences: all chosen ones, then the rejected
    ones in the same order. margins: one per pair, [P]; NaN means policy.margin.

    Raises:
        ValueError: an odd number of sequences.
    """
    if len(sequences) % 2:
        raise ValueError(f"{len(sequences)} sequences are no pairs: all chosen ones, then as many rejected ones")
    values = values if values.dtype == torch.float64 else values.float()
    chosen, rejected = last_values(values, sequences=sequences).chunk(2)
    if policy.loss == "per_token":
        losses = _per_token(values, sequences=sequences)
    else:
        margin = policy.margin if margins is None else torch.where(margins.isnan(), policy.margin, margins)
        losses = -F.logsigmoid(chosen - rejected - margin)
    if policy.centring:
        losses = losses + policy.centring * (chosen + rejected).square()
    return PairLosses(losses=losses, chosen=chosen.detach(), rejected=rejected.detach())


def _per_token(values: Tensor, *, sequences: Sequences) -> Tensor:
    """Returns [P]. After the end of the shorter sequence, its last value is compared; DeepSpeed-Chat uses values of padding there."""
    lengths, tokens = sequences.lengths.tolist(), sequences.tokens.split(sequences.lengths.tolist())
    parts, half = values.split(lengths), len(lengths) // 2
    losses = []
    for pair in range(half):
        first, second = tokens[pair], tokens[pair + half]
        shorter, longer = sorted((len(first), len(second)))
        differs = (first[:shorter] != second[:shorter]).nonzero()
        start = int(differs[0]) if len(differs) else min(shorter, longer - 1)
        chosen, rejected = (_extended(parts[index], length=longer)[start:] for index in (pair, pair + half))
        losses.append(-F.logsigmoid(chosen - rejected).mean())
    return torch.stack(losses)


def _extended(values: Tensor, *, length: int) -> Tensor:
    """Extends values [n] to [length] by repeating the last one."""
    return torch.cat([values, values[-1:].expand(length - len(values))])


@dataclass(frozen=True, kw_only=True, slots=True)
class PairLogprobs:
    """Sums of log-probabilities over the tokens of P chosen and P rejected answers, [P] each, and their numbers of tokens, int64 [P].

    chosen_texts: sums over the chosen answers and their prompts, [P], or None if unknown.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    chosen_texts: Tensor | None = None

    @classmethod
    def of(cls, logprobs: Tensor, *, sequences: Sequences) -> "PairLogprobs":
        """Computes sums from log-probabilities [T] of 2P sequences: all chosen ones, then the rejected ones in the same order."""
        chosen, rejected = segment_sums(logprobs, lengths=sequences.lengths).chunk(2)
        chosen_tokens, rejected_tokens = sequences.answer_lengths.chunk(2)
        return cls(chosen=chosen, rejected=rejected, chosen_tokens=chosen_tokens, rejected_tokens=rejected_tokens)


def dpo_losses(pairs: PairLogprobs, *, policy: DpoPolicy, reference: PairLogprobs | None) -> PairLosses:
    """Returns the loss of every pair without the term of sft_weight, and the implicit rewards beta * log(p / p_reference).

    reference: the same pairs under the reference; without it, its log-probabilities are taken as 0.

    Raises:
        ValueError: dpo.loss=kto, the loss of single answers.
    """
    if policy.loss == "kto":
        raise ValueError("dpo.loss=kto: pairs have another loss; use kto_losses, or dpo.loss=sigmoid")
    chosen = pairs.chosen if reference is None else pairs.chosen - reference.chosen
    rejected = pairs.rejected if reference is None else pairs.rejected - reference.rejected
    if policy.is_mean:
        chosen, rejected = chosen / pairs.chosen_tokens, rejected / pairs.rejected_tokens
    margin = chosen - rejected
    if policy.loss == "ipo":
        losses = (margin - 1 / (2 * policy.beta)).square()
    elif policy.loss == "hinge":
        losses = torch.relu(1 - policy.beta * margin)
    elif policy.loss == "orpo":
        losses = -policy.beta * F.logsigmoid(margin - (_log1mexp(chosen) - _log1mexp(rejected)))
    else:
        smooth, scaled = policy.label_smoothing, policy.beta * margin
        if policy.loss == "simpo":
            scaled = scaled - policy.margin
        losses = -F.logsigmoid(scaled) * (1 - smooth) - F.logsigmoid(-scaled) * smooth
    return PairLosses(losses=losses, chosen=policy.beta * chosen.detach(), rejected=policy.beta * rejected.detach())


def dpo_loss(found: PairLosses, *, pairs: PairLogprobs, policy: DpoPolicy, num_pairs: int, num_tokens: int) -> Tensor:
    """Returns this micro-batch's part of the step's loss, a scalar.

    The parts of all micro-batches and ranks add up to the mean over the step.

    num_pairs: number of pairs in the step. num_tokens: number of tokens of the step's chosen answers; for orpo, of the chosen texts without
    their first tokens.
    """
    loss = found.losses.sum() / num_pairs
    if not policy.sft_weight:
        return loss
    logprobs = pairs.chosen_texts if policy.loss == "orpo" else pairs.chosen
    assert logprobs is not None, "orpo learns whole texts"
    return loss - policy.sft_weight * logprobs.sum() / num_tokens


def _log1mexp(x: Tensor) -> Tensor:
    """Returns log(1 - exp(x)) of x <= 0, without cancellation (Maechler 2012, https://cran.r-project.org/package=Rmpfr).

    0, the log-probability of a certain answer, is replaced by the largest number below it, and has no gradient.
    """
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near = x > -math.log(2)
    return torch.where(
        near, torch.log(-torch.expm1(torch.where(near, x, -1.0))), torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    )


def kto_losses(log_ratios: Tensor, *, labels: Tensor, kl: Tensor, policy: DpoPolicy) -> Tensor:
    """Returns the loss of every answer: log ratios to the reference [P], labels bool [P] -> [P].

    kl: the mean log ratio of answers to other prompts, a scalar without gradient; negative values are taken as 0.

    Raises:
        ValueError: another loss than dpo.loss=kto.
    """
    if policy.loss != "kto":
        raise ValueError(f"dpo.loss={policy.loss}: single answers have another loss; use dpo_losses, or dpo.loss=kto")
    signs = torch.where(labels, 1.0, -1.0).to(log_ratios)
    weights = torch.where(labels, policy.desirable_weight, policy.undesirable_weight).to(log_ratios)
    return weights * (1 - torch.sigmoid(policy.beta * signs * (log_ratios - kl.clamp(min=0))))
