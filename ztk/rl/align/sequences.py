"""Packed sequences: S of them one after another, T tokens in total, and a mask of tokens that count in a loss. There is no padding.

Sums have the dtype of the values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """tokens: int64 [T]. lengths: one per sequence, int64 [S]. answer: whether the token counts in the loss, bool [T].

    Raises:
        ValueError: inconsistent shapes, an empty sequence, or an answer without a token before it.
    """

    tokens: Tensor
    lengths: Tensor
    answer: Tensor

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or self.answer.shape != self.tokens.shape or self.lengths.ndim != 1:
            raise ValueError(
                f"tokens {list(self.tokens.shape)}, answer {list(self.answer.shape)}, lengths {list(self.lengths.shape)}: must be [T], "
                "[T] and [S]"
            )
        if self.tokens.device.type != "cpu":
            return  # checked before the copy; a check here would wait for the device
        if len(self.lengths) == 0 or int(self.lengths.min()) < 1:
            raise ValueError(f"lengths={self.lengths.tolist()}: there must be sequences, each with a token or more")
        if int(self.lengths.sum()) != len(self.tokens):
            raise ValueError(f"lengths sum to {int(self.lengths.sum())} and there are {len(self.tokens)} tokens")
        if self.answer[self.starts].any():
            raise ValueError(
                "the first token of a sequence has nothing before it to be predicted from: answer must be False there"
            )

    @classmethod
    def of(cls, parts: Sequence[tuple[Tensor, Tensor]]) -> Self:
        """Packs one sequence per (tokens [n], answer [n])."""
        return cls(
            tokens=torch.cat([tokens for tokens, _ in parts]).long(),
            lengths=torch.tensor([len(tokens) for tokens, _ in parts]),
            answer=torch.cat([answer for _, answer in parts]),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> Tensor:
        """Index of each sequence's first token, int64 [S]."""
        return self.lengths.cumsum(0) - self.lengths

    @property
    def ends(self) -> Tensor:
        """Index of each sequence's last token, int64 [S]."""
        return self.lengths.cumsum(0) - 1

    @property
    def positions(self) -> Tensor:
        """Each token's position in its sequence, int64 [T]."""
        index = torch.arange(len(self.tokens), device=self.tokens.device)
        return index - self.starts.repeat_interleave(self.lengths, output_size=len(self.tokens))

    @property
    def answer_lengths(self) -> Tensor:
        """Number of counted tokens in each sequence, int64 [S]."""
        return segment_sums(self.answer.double(), lengths=self.lengths).long()

    def to(self, device: torch.device | str) -> "Sequences":
        """Returns a copy on `device`."""
        return Sequences(tokens=self.tokens.to(device), lengths=self.lengths.to(device), answer=self.answer.to(device))

    def rows(self, *, length: int, pad: int) -> Tensor:
        """Returns one sequence per row, padded with `pad` at the end: int64 [S, length], for causal models.

        Raises:
            ValueError: a longer sequence.
        """
        if (longest := int(self.lengths.max())) > length:
            raise ValueError(f"a sequence of {longest} tokens does not fit into a row of {length}")
        rows = self.tokens.new_full((len(self), length), pad)
        rows[self.is_token(length=length)] = self.tokens
        return rows

    def mask(self, *, length: int) -> Tensor:
        """Returns whether a token of `rows` counts: bool [S, length]."""
        mask = self.answer.new_zeros(len(self), length)
        mask[self.is_token(length=length)] = self.answer
        return mask

    def is_token(self, *, length: int) -> Tensor:
        """Returns whether a position of `rows` is a token, not padding: bool [S, length]."""
        return torch.arange(length, device=self.lengths.device) < self.lengths.unsqueeze(1)


def segment_sums(values: Tensor, *, lengths: Tensor) -> Tensor:
    """Returns the sum over each sequence: values [T], lengths [S] -> [S]. A sum does not depend on the other sequences in the pack."""
    return torch.segment_reduce(values, "sum", lengths=lengths, axis=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Positions of the counted tokens in S rows of T. places: indices in the flattened rows, int64 [N]. lengths: per row, int64 [S]."""

    places: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, mask: Tensor, *, device: torch.device | str | None = None) -> Self:
        """Makes positions from a mask of tokens, bool [S, T]. device: device of the rows, by default the mask's.

        A mask on the CPU avoids synchronization.
        """
        device = mask.device if device is None else device
        return cls(places=mask.flatten().nonzero().squeeze(1).to(device), lengths=mask.sum(1).to(device))

    def pack(self, rows: Tensor) -> Tensor:
        """Packs values of rows [S, T, ...] -> [N, ...]."""
        return rows.flatten(0, 1).index_select(0, self.places)

    def unpack(self, packed: Tensor, *, length: int) -> Tensor:
        """Unpacks [N] -> [S, length], 0 elsewhere."""
        rows = packed.new_zeros(len(self.lengths) * length)
        return rows.index_copy(0, self.places, packed).view(-1, length)


def counted_logprobs(rows: Tensor, *, sequences: Sequences) -> Tensor:
    """Returns log p(token | previous tokens of its sequence), from the logits that predict the N counted tokens: [N, V] -> [T].

    0 for tokens that do not count. The result is float64 for float64 logits, else float32.
    """
    index = sequences.answer.nonzero().squeeze(1)
    rows = rows if rows.dtype == torch.float64 else rows.float()
    chosen = rows.gather(1, sequences.tokens[index].unsqueeze(1)).squeeze(1)
    found = chosen - rows.logsumexp(dim=1)
    return found.new_zeros(len(sequences.tokens)).index_copy(0, index, found)
