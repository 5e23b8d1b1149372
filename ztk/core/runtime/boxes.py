"""Ranges of flattened tensors as boxes. Overlaps are computed from corners, without lists of positions.

Views have the dtype of their tensor.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """The indices [start, start + shape) of a tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of its elements in contiguous storage."""
        return tuple(prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of its elements in a tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))

    def narrowed(self, axis: int, *, start: int, stop: int) -> "Box":
        """Returns the indices [start, stop) of the box along `axis`, counted from the box's own start."""
        starts, shape = list(self.start), list(self.shape)
        starts[axis], shape[axis] = self.start[axis] + start, stop - start
        return Box(start=tuple(starts), shape=tuple(shape))

    def without(self, axis: int) -> "Box":
        """Returns the box without one axis."""
        return Box(start=self.start[:axis] + self.start[axis + 1 :], shape=self.shape[:axis] + self.shape[axis + 1 :])

    def moved(self, by: tuple[int, ...]) -> "Box":
        """Returns the box with `by` added to every index."""
        return Box(start=tuple(a + b for a, b in zip(self.start, by, strict=True)), shape=self.shape)

    def overlap(self, other: "Box") -> "Box | None":
        """Returns the intersection of both boxes, or None."""
        start = tuple(map(max, self.start, other.start))
        stops = [min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)]
        shape = tuple(stop - first for stop, first in zip(stops, start, strict=True))
        return Box(start=start, shape=shape) if all(size > 0 for size in shape) else None

    def first_in(self, outer: "Box") -> int:
        """Returns the offset of the first element of the box in the contiguous elements of `outer`."""
        return sum((a - b) * step for a, b, step in zip(self.start, outer.start, outer.strides, strict=True))

    def span_in(self, outer: "Box") -> int:
        """Returns the number of `outer`'s elements from the first to the last element of the box, inclusive."""
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, outer.strides, strict=True))

    def rows(self, *, outer: "Box", limit: int) -> Iterator["Box"]:
        """Splits the box into boxes that span at most `limit` elements of `outer`, or a single index of an axis."""
        axis = next((axis for axis, size in enumerate(self.shape) if size > 1), None)
        if axis is None or self.span_in(outer) <= limit:
            yield self
            return
        step = max(1, limit // outer.strides[axis])
        for first in range(0, self.shape[axis], step):
            piece = self.narrowed(axis, start=first, stop=min(first + step, self.shape[axis]))
            yield from piece.rows(outer=outer, limit=limit) if step == 1 else (piece,)

    def view(self, flat: Tensor, *, outer: "Box", first: int) -> Tensor:
        """Returns a view of the box's elements in contiguous `flat`, which starts at element `first` of `outer`."""
        offset = flat.storage_offset() + self.first_in(outer) - first
        return flat.as_strided(self.shape, outer.strides, offset)


def boxes_of(shape: tuple[int, ...], *, start: int, stop: int) -> Iterator[Box]:
    """Yields elements [start, stop) of a flattened tensor of `shape` as boxes with contiguous elements, in order.

    There are at most 2 * len(shape) - 1 boxes.
    """
    if start >= stop:
        return
    if not shape:
        yield Box(start=(), shape=())
        return
    inner = prod(shape[1:])
    (row, begin), (last_row, end) = divmod(start, inner), divmod(stop, inner)
    if begin or row == last_row:
        cut = inner if row < last_row else end
        yield from _in_row(row, boxes=boxes_of(shape[1:], start=begin, stop=cut))
        row += 1
    if row < last_row:
        yield Box(start=(row, *(0 for _ in shape[1:])), shape=(last_row - row, *shape[1:]))
    if end and row <= last_row:
        yield from _in_row(last_row, boxes=boxes_of(shape[1:], start=0, stop=end))


def _in_row(row: int, *, boxes: Iterator[Box]) -> Iterator[Box]:
    for box in boxes:
        yield Box(start=(row, *box.start), shape=(1, *box.shape))
