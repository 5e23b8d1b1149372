"""Mixes several sources into one order of sequences, in given proportions.

[Note: Mixture] The endless order of [Note: Global order] is divided into blocks of `BLOCK` positions. Every block contains exactly
`shares[k]` positions of source k, placed by a permutation that depends on (seed, block). The source of a position, and the number of
earlier sequences of the source, thus take a few multiplications. The order needs no memory, and the position is the only state, as with
one source. Each source has its own epochs.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from torch import Tensor

from ztk.data.permutation import Permutation
from ztk.data.stream import Batch, Share, Stream, TokenStream, batches_of, sequences_in, window

BLOCK = 10_000


def shares_of(weights: Sequence[float]) -> list[int]:
    """Returns how many of `BLOCK` sequences come from each source, in proportion to `weights`. They add up to `BLOCK`.

    Raises:
        ValueError: a weight is not positive, or so small that a source would have no sequence in a block.
    """
    total = sum(weights)
    if not weights or min(weights) <= 0 or not total < float("inf"):
        raise ValueError(
            f"data.mixture={list(weights)}: weights must be positive numbers; leave sources out of data.path"
        )
    exact = [weight / total * BLOCK for weight in weights]
    shares = [int(value) for value in exact]
    largest_rests = sorted(range(len(exact)), key=lambda index: shares[index] - exact[index])
    for index in largest_rests[: BLOCK - sum(shares)]:
        shares[index] += 1
    if not min(shares):
        raise ValueError(
            f"data.mixture={list(weights)}: a source would have less than 1 of {BLOCK} sequences; leave it out of data.path, or use a "
            f"weight of {total / BLOCK:g} or more"
        )
    return shares


class MixedStream(Stream):
    """Sequences of several sources. See [Note: Mixture]."""

    def __init__(self, sources: Sequence[TokenStream], *, weights: Sequence[float], share: Share, seed: int) -> None:
        """Raises ValueError for weights that are not positive numbers."""
        super().__init__(share, seq_len=sources[0].seq_len, end=sources[0].end)
        self._sources, self._seed = tuple(sources), seed
        self._shares = shares_of(weights)
        self._ends = list(accumulate(self._shares))
        self._block, self._order = -1, Permutation(1, seed=())

    def source_of(self, position: int) -> tuple[int, int]:
        """Returns the number of the source at a position, and the number of earlier sequences of this source."""
        block, index = divmod(position, BLOCK)
        if block != self._block:
            self._block, self._order = block, Permutation(BLOCK, seed=(self._seed, "mixture", block))
        value = self._order[index]
        source = next(number for number, end in enumerate(self._ends) if value < end)
        return source, block * self._shares[source] + value - (self._ends[source] - self._shares[source])

    def sequence(self, position: int) -> Tensor:
        source, number = self.source_of(position)
        return self._sources[source].sequence(number)

    def identity(self) -> dict[str, object]:
        return {"sources": [source.identity() for source in self._sources], "shares": self._shares, "seed": self._seed}


def held_out_batches(
    parts: Sequence[Tensor],
    *,
    weights: Sequence[float] = (1.0,),
    seq_len: int,
    share: Share,
    num_sequences: int,
    end: int | None = None,
) -> Iterator[Batch]:
    """Yields this rank's micro-batches of `num_sequences` sequences, or of all if there are fewer: in proportion to the weights of their
    sources, at least one from each, and spread evenly over its tokens. They are always the same.

    parts: tokens [n] of each source. end: the same as in `Stream`. share: only its ranks and micro-batch size are used.

    Raises:
        ValueError: a part is shorter than one sequence.
    """
    picks = held_out_picks(parts, weights=weights, seq_len=seq_len, num_sequences=num_sequences)
    yield from batches_of(
        len(picks),
        share=share,
        read=lambda number: window(parts[picks[number][0]], index=picks[number][1], seq_len=seq_len),
        end=end,
    )


def held_out_picks(
    parts: Sequence[Tensor], *, weights: Sequence[float], seq_len: int, num_sequences: int
) -> list[tuple[int, int]]:
    """Returns the sequences for evaluation: (source, number of the sequence in it). parts: tokens [n] of each source.

    Raises ValueError if a part is shorter than one sequence.
    """
    picks = []
    for source, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        available = sequences_in(part, seq_len=seq_len)
        count = min(available, max(1, round(num_sequences * weight / sum(weights))))
        picks += [(source, index * available // count) for index in range(count)]
    return picks
