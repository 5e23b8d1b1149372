"""Attention masks between a rank's chunks and an arriving block's, for attention around a ring: see [Note: Zigzag] in
`ztk.parallel.sequence.ring`.

[Note: Documents]
If sequences are packed documents, a chunk shares at most one document with earlier chunks: the one in which it begins. The chunk's first
queries, up to that document's end, attend to the other chunk's keys from that document's start on. So two different chunks have an unmasked
rectangle per sequence, or nothing, and the other documents of a chunk are inside it.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ztk.kernels import PackedPair, Pair, Part


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks:
    """Chunks of `length` tokens of each of a batch's sequences. window: tokens of a sliding window, or 0. starts: per sequence, the
    positions where its documents begin, 0 first. If omitted, attention crosses documents."""

    length: int
    window: int = 0
    starts: tuple[tuple[int, ...], ...] | None = None

    def pair(self, *, query: int, key: int, device: torch.device) -> Pair | PackedPair | None:
        """The pair of queries of chunk `query` and keys of chunk `key`, counted along the sequence, or None if all is masked. device: of
        the result."""
        if key > query:
            return None
        if self.starts is None:
            return self._plain(query=query, key=key)
        if key == query:
            return self._own(query, device=device)
        parts = tuple(self._rectangles(query=query, key=key))
        if all(part.pair.length == part.pair.keys == self.length for part in parts) and len(parts) == len(self.starts):
            return self._plain(query=query, key=key)
        return PackedPair(parts=parts) if parts else None

    def _plain(self, *, query: int, key: int) -> Pair | None:
        pair = Pair(length=self.length, keys=self.length, distance=(query - key) * self.length, window=self.window)
        return None if pair.is_empty else pair

    def _own(self, chunk: int, *, device: torch.device) -> PackedPair:
        """The documents of a chunk, or their parts in it."""
        first, ends = chunk * self.length, []
        for number, starts in enumerate(self.starts or ()):
            inside = [start - first for start in starts if first < start < first + self.length]
            ends += [number * self.length + place for place in (*inside, self.length)]
        borders = [0, *ends]
        parts = tuple(
            Part(query=start, key=start, pair=Pair(length=stop - start, keys=stop - start, distance=0))
            for start, stop in zip(borders, ends, strict=False)
        )
        longest = max(part.pair.length for part in parts)
        return PackedPair(
            parts=parts, cu_seqlens=torch.tensor(borders, dtype=torch.int32, device=device), longest=longest
        )

    def _rectangles(self, *, query: int, key: int) -> Iterator[Part]:
        first = query * self.length
        for number, starts in enumerate(self.starts or ()):
            place = bisect_right(starts, first)
            start = starts[place - 1]
            stop = min([*starts[place : place + 1], first + self.length])
            keys = (key + 1) * self.length - max(start, key * self.length)
            if start < first and keys > 0:
                yield Part(
                    query=number * self.length,
                    key=(number + 1) * self.length - keys,
                    pair=Pair(length=min(stop - first, self.length), keys=keys, distance=keys),
                )
