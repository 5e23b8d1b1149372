"""Formats with fewer bytes in which ranks send their shards of a bucket's parameters to each other.

[Note: Float8 shards]
A rank's message has a code per element, the elements of at most two rows that the ends of its shard cut, in bfloat16, and a byte per row that
lies in the shard as a whole: the exponent of its scale, which is a power of two. A cut row would need the magnitudes of another rank for its
scale. Its parts arrive exactly, and the product that follows quantises the row (`ztk.nn.float8`), with the same bits as for a row that was
sent as codes. All messages of a bucket have the same length.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ztk.core.precision.float8 import CODES, quantise_rows
from ztk.kernels import dequantize, quantize, quantized_bytes
from ztk.zero.buckets.layout import BucketLayout

_BITS = 8
_EXPONENT = 23  # position in a float32
_ALIGNMENT = 16


class ShardFormat(Protocol):
    """name: used in labels of collectives. nbytes: size of one rank's message. is_repeated: all readers round the parameters in this way
    themselves, so they read the same from exact parameters."""

    name: str
    nbytes: int
    is_repeated: bool

    def pack(self, full: Tensor, *, rank: int, out: Tensor) -> None:
        """Fills `out` int8 [nbytes] from the shard of `rank` in `full` [size]."""
        ...

    def unpack(self, messages: Tensor, *, full: Tensor) -> None:
        """Fills `full` [size] from the messages of all ranks, int8 [ranks, nbytes]."""
        ...


class Int8Shards:
    """Blocks of int8 with a scale each, see `ztk.kernels.quantize`."""

    name, is_repeated = "int8", False

    def __init__(self, layout: BucketLayout) -> None:
        self._shards, self._numel = layout.num_shards, layout.shard_size
        self.nbytes = quantized_bytes(self._numel, bits=_BITS)

    def pack(self, full: Tensor, *, rank: int, out: Tensor) -> None:
        out.copy_(quantize(full.view(self._shards, -1)[rank], bits=_BITS)[0])

    def unpack(self, messages: Tensor, *, full: Tensor) -> None:
        values = dequantize(messages, numel=self._numel, bits=_BITS, dtype=full.dtype)
        full.view(self._shards, -1).copy_(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """Full rows of one matrix in a shard. start: index of the first element in the bucket. number: index of the first row among the shard's
    full rows."""

    start: int
    count: int
    width: int
    number: int

    def of(self, full: Tensor) -> Tensor:
        """[count, width], a view of `full` [size]."""
        return full[self.start : self.start + self.count * self.width].view(self.count, self.width)


class Float8Shards:
    """See [Note: Float8 shards]. The bucket has matrices only, in bfloat16."""

    name, is_repeated = "float8", True

    def __init__(self, layout: BucketLayout) -> None:
        self._numel = layout.shard_size
        cut = [_cut(layout, rank=rank) for rank in range(layout.num_shards)]
        self._rows, self._ends = [rows for rows, _ in cut], [ends for _, ends in cut]
        self._longest = max((len(end) for ends in self._ends for end in ends), default=0)
        self._num_rows = max(sum(rows.count for rows in own) for own in self._rows)
        nbytes = self._numel + 2 * self._longest * torch.bfloat16.itemsize + self._num_rows
        self.nbytes = -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def pack(self, full: Tensor, *, rank: int, out: Tensor) -> None:
        codes, ends, exponents = self._parts(out.zero_())
        for rows in self._rows[rank]:
            own, scales = quantise_rows(rows.of(full))
            first = rows.start - rank * self._numel
            codes[first : first + own.numel()].copy_(own.view(torch.int8).view(-1))
            exponents[rows.number : rows.number + rows.count].copy_(scales.view(torch.int32)[:, 0] >> _EXPONENT)
        for number, end in enumerate(self._ends[rank]):
            ends[number, : len(end)].copy_(full[end.start : end.stop])

    def unpack(self, messages: Tensor, *, full: Tensor) -> None:
        full.view(len(messages), -1).copy_(messages[:, : self._numel].view(CODES))
        for message, own, cut in zip(messages, self._rows, self._ends, strict=True):
            _, ends, exponents = self._parts(message)
            scales = (exponents.to(torch.int32) << _EXPONENT).view(torch.float32).to(full.dtype)
            for rows in own:
                rows.of(full).mul_(scales[rows.number : rows.number + rows.count, None])
            for number, end in enumerate(cut):
                full[end.start : end.stop].copy_(ends[number, : len(end)])

    def _parts(self, message: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes int8 [shard], ends bfloat16 [2, longest] and exponents uint8 [rows]: views of int8 [nbytes]."""
        stop = self._numel + 2 * self._longest * torch.bfloat16.itemsize
        ends = message[self._numel : stop].view(torch.bfloat16).view(2, self._longest)
        return message[: self._numel], ends, message[stop : stop + self._num_rows].view(torch.uint8)


def _cut(layout: BucketLayout, *, rank: int) -> tuple[list[_Rows], list[range]]:
    """The full rows of matrices in a shard, and the ranges in the bucket of the parts of rows at its ends."""
    shard, rows, ends, number = layout.shard(rank), [], [], 0
    for fragment in layout.fragments(shard):
        width = layout.placement(fragment.name).shape[1]
        offset = shard.start + fragment.place.start - fragment.start  # of the matrix in the bucket
        first, last = -(-fragment.start // width) * width, fragment.stop // width * width
        if first < last:
            count = (last - first) // width
            rows.append(_Rows(start=offset + first, count=count, width=width, number=number))
            number += count
        bounds = (fragment.start, first), (last, fragment.stop)
        if first > last:  # inside of one row
            bounds = ((fragment.start, fragment.stop),)
        ends += [range(offset + start, offset + stop) for start, stop in bounds if start < stop]
    return rows, ends
