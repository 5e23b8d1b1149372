"""The tokens kept by a rollout's top-k, top-p and min-p, so that the trainer's log-probabilities are normalized over the same tokens.

[Note: Log-probabilities over kept tokens] With `rollout.top_p`, tokens are sampled from a subset with probability p / (its mass). The
trainer's softmax over all tokens gives p, so that even with unchanged weights every ratio would be the kept mass
(https://github.com/huggingface/trl/issues/6789). Therefore the numbers of the kept tokens are stored with the samples, and policy and
reference are normalized over them, regardless of later changes of the weights. Sets are stored as numbers, 4 bytes each, because they are
small if the cut has an effect.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

# (logits [n, V], slice of their tokens) -> the same with -inf for tokens that were not kept
Hide = Callable[[Tensor, slice], Tensor]
# rows, positions and tokens, int64 [M] each: one per kept token of a place
Entries = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """tokens: int32 [N], the kept ones of each place, row after row. counts: int64 [S, T], number per place; 0 outside answers."""

    tokens: Tensor
    counts: Tensor

    @classmethod
    def of(cls, entries: Sequence[Entries], *, shape: Sequence[int]) -> Self:
        """entries: with places in any order. shape: S, T."""
        rows, positions, tokens = (torch.cat(column) for column in zip(*entries, strict=True))
        places = rows * shape[1] + positions
        counts = torch.bincount(places, minlength=shape[0] * shape[1]).view(*shape)
        return cls(tokens=tokens[places.argsort(stable=True)].to(torch.int32), counts=counts)

    def __getitem__(self, rows: slice | Tensor) -> "Kept":
        parts = self.tokens.split(self.counts.sum(1).tolist())
        chosen = torch.arange(len(self.counts))[rows].tolist()
        tokens = torch.cat([parts[row] for row in chosen]) if chosen else self.tokens[:0]
        return Kept(tokens=tokens, counts=self.counts[rows])

    @classmethod
    def joined(cls, parts: Sequence["Kept"]) -> Self:
        """Concatenates the rows of all `parts`."""
        return cls(tokens=torch.cat([part.tokens for part in parts]), counts=torch.cat([part.counts for part in parts]))

    def entries(self) -> Entries:
        """Returns the argument of `of`."""
        rows, positions = self.counts.nonzero().unbind(1)
        counts = self.counts[rows, positions]
        return rows.repeat_interleave(counts), positions.repeat_interleave(counts), self.tokens.long()


def hide_of(kept: Kept | None, *, mask: Tensor, device: torch.device) -> Hide | None:
    """Returns a mask function for logits on `device` that predict the tokens of `mask`, bool [S, T], in order, or None if nothing was
    cut.
    """
    if kept is None:
        return None
    counts = kept.counts[mask]
    borders = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).tolist()
    rows = torch.arange(len(counts)).repeat_interleave(counts).to(device)
    tokens = kept.tokens.to(device, torch.int64)

    def hide(logits: Tensor, cut: slice) -> Tensor:
        own = slice(borders[cut.start], borders[cut.start + len(logits)])
        hidden = torch.ones_like(logits, dtype=torch.bool)
        hidden[rows[own] - cut.start, tokens[own]] = False
        return logits.masked_fill(hidden, -math.inf)

    return hide


def entries_of(kept: Tensor, *, rows: Tensor, positions: Tensor) -> Entries:
    """Returns entries for `Kept.of` from kept tokens at places (rows, positions), int64 [R] each: kept bool [R, V] on the CPU."""
    which, tokens = kept.nonzero().unbind(1)
    return rows[which], positions[which], tokens
