"""A piece: the stretch of a bucket that is fetched, updated and put back at once."""

from dataclasses import dataclass

from torch import Tensor

from ztk.zero.layout import BucketLayout, Segment
from ztk.zero.store import Slot


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """Elements [start, stop) of a bucket, within one shard.

    segments: the piece cut by parameter group, in elements of the bucket.
    states: [k, stop - start] fp32: the master weights (unless the parameter is its own master), then the optimizer's moments. None if frozen.
    gradient: the reduced gradient, if gradients are sharded.
    parameter: the parameter shard, if parameters are sharded.
    """

    start: int
    stop: int
    segments: tuple[Segment, ...]
    states: Slot | None
    gradient: Slot | None
    parameter: Slot | None

    def of(self, full: Tensor) -> Tensor:
        """This piece of a buffer that spans the whole bucket."""
        return full[self.start : self.stop]


def cut_shard(layout: BucketLayout, *, rank: int, piece_size: int | None) -> list[range]:
    """Rank's shard as ranges of at most `piece_size` elements."""
    shard = layout.shard(rank)
    step = piece_size or layout.shard_size
    return [range(start, min(start + step, shard.stop)) for start in range(shard.start, shard.stop, step)]
