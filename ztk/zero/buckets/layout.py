"""Positions of parameters in a flat buffer, and the shards of the buffer by rank.

Pure arithmetic on names, shapes and the number of ranks, without tensors or processes. The layout does not depend on the ZeRO stage or the
offload tier: this is the first reason why neither changes a number. All offsets and sizes are in elements.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

# Parameters start at multiples of 32 elements: 64 bytes in 16 bit, so that vector loads and CPU kernels have the
# same alignment in every buffer. Every shard is a multiple of 128: 512 bytes in fp32.
PARAMETER_ALIGNMENT = 32
SHARD_ALIGNMENT = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSpec:
    """A parameter before it is placed. `group` is the number of its parameter group in the optimizer."""

    name: str
    shape: tuple[int, ...]
    group: int = 0

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """A parameter's elements in the bucket: [offset, offset + numel)."""

    name: str
    shape: tuple[int, ...]
    group: int
    offset: int
    numel: int

    @property
    def stop(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Elements [start, stop) of a bucket, all of one parameter group. Padding belongs to the preceding group.

    position: index of the first element in the model, see `ztk.zero.update.positions`; 0 if nothing is rounded stochastically.
    """

    start: int
    stop: int
    group: int
    position: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragment:
    """The part of one parameter within a range of the bucket.

    start, stop: the parameter's flat elements. place: their position, counted from the start of the range.
    """

    name: str
    start: int
    stop: int
    place: slice


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketLayout:
    """The parameters of one flat buffer of `size` elements (padding included), which is cut into `num_shards` equal shards."""

    placements: tuple[Placement, ...]
    size: int
    num_shards: int

    @staticmethod
    def plan(specs: Sequence[ParameterSpec], *, num_shards: int) -> "BucketLayout":
        """Places `specs` one after the other. Parameters of one group lie together, so that a shard has few segments."""
        placements, offset = [], 0
        for spec in sorted(specs, key=lambda spec: spec.group):
            placements.append(
                Placement(name=spec.name, shape=spec.shape, group=spec.group, offset=offset, numel=spec.numel)
            )
            offset = _round_up(offset + spec.numel, PARAMETER_ALIGNMENT)
        size = max(_round_up(offset, num_shards * SHARD_ALIGNMENT), num_shards * SHARD_ALIGNMENT)
        return BucketLayout(placements=tuple(placements), size=size, num_shards=num_shards)

    @property
    def shard_size(self) -> int:
        """Elements of one shard."""
        return self.size // self.num_shards

    @property
    def num_parameters(self) -> int:
        """Elements without padding."""
        return sum(placement.numel for placement in self.placements)

    def placement(self, name: str) -> Placement:
        """The place of parameter `name`."""
        return next(placement for placement in self.placements if placement.name == name)

    def shard(self, rank: int) -> range:
        """The elements that belong to `rank`."""
        return range(rank * self.shard_size, (rank + 1) * self.shard_size)

    def segments(self, span: range, *, positions: Mapping[str, int] | None = None) -> Iterator[Segment]:
        """`span`, cut where the parameter group changes or positions jump. Padding belongs to the preceding parameter.

        positions: indices of the parameters' first elements in the model. If omitted, jumps of positions cause no cut.
        """
        start, of = span.start, None
        for placement in self.placements:
            this = placement.group, None if positions is None else positions[placement.name] - placement.offset
            if this == of:
                continue
            boundary = max(placement.offset, span.start)
            if of is not None and boundary > start:
                yield _segment(start, stop=min(boundary, span.stop), of=of)
                start = boundary
            if boundary >= span.stop:
                return
            of = this
        assert of is not None, "a bucket has parameters"
        yield _segment(start, stop=span.stop, of=of)

    def fragments(self, span: range) -> Iterator[Fragment]:
        """The parts of parameters that lie in `span`, in order."""
        for placement in self.placements:
            start, stop = max(placement.offset, span.start), min(placement.stop, span.stop)
            if start < stop:
                yield Fragment(
                    name=placement.name,
                    start=start - placement.offset,
                    stop=stop - placement.offset,
                    place=slice(start - span.start, stop - span.start),
                )

    def gaps(self) -> Iterator[range]:
        """The ranges of padding."""
        position = 0
        for placement in self.placements:
            if placement.offset > position:
                yield range(position, placement.offset)
            position = placement.stop
        if position < self.size:
            yield range(position, self.size)


def _segment(start: int, *, stop: int, of: tuple[int, int | None]) -> Segment:
    """of: its group, and the difference between positions and places."""
    group, distance = of
    return Segment(start=start, stop=stop, group=group, position=0 if distance is None else distance + start)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
