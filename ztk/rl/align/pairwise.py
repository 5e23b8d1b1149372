"""Losses of a reward model over pairs of sequences: all chosen ones, then the rejected ones in the same order.

Losses are float32, or float64 for float64 values.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ztk.rl.align.sequences import Sequences

LOSSES = ("bradley_terry", "per_token")


@dataclass(frozen=True, kw_only=True, slots=True)
class PairwisePolicy:
    """loss: bradley_terry is -log sigmoid(chosen - rejected - margin) of the values at the last tokens (Ouyang et al. 2022, arXiv
    2203.02155; margin: Touvron et al. 2023, arXiv 2307.09288). per_token is DeepSpeed-Chat's: the mean of -log sigmoid(chosen - rejected)
    over the positions from the first token in which the sequences differ to the end of the longer one.
    margin: for pairs without their own. centring: factor of (chosen + rejected)^2 at the last tokens (Eisenstein et al. 2023, arXiv
    2312.09244).

    Raises:
        ValueError: a number out of its range, an unknown loss, or a margin with per_token.
    """

    loss: str = "bradley_terry"
    margin: float = 0.0
    centring: float = 0.0

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"reward.loss={self.loss}: must be one of {', '.join(LOSSES)}")
        if not self.centring >= 0:
            raise ValueError(f"reward.centring={self.centring}: must be 0 or more")
        if self.margin and self.loss == "per_token":
            raise ValueError(
                f"reward.margin={self.margin}: reward.loss=per_token has none; use 0, or reward.loss=bradley_terry"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PairwiseLosses:
    """losses: one per pair, [P]. chosen, rejected: the values at the last tokens, [P]."""

    losses: Tensor
    chosen: Tensor
    rejected: Tensor


def last_values(values: Tensor, *, sequences: Sequences) -> Tensor:
    """Returns values [T] at the last token of every sequence: [S], float64 for float64, else float32."""
    values = values if values.dtype == torch.float64 else values.float()
    return values.index_select(0, sequences.ends)


def pairwise_losses(
    values: Tensor, *, sequences: Sequences, policy: PairwisePolicy, margins: Tensor | None = None
) -> PairwiseLosses:
    """Returns the loss of every pair, from values [T] of 2P sequences. margins: of the pairs, [P]; NaN means policy.margin.

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
    return PairwiseLosses(losses=losses, chosen=chosen.detach(), rejected=rejected.detach())


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
