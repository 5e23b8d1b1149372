"""A piece: the range of a bucket that is fetched, updated and written back at once.

Views have the dtype of their buffer.
"""

from dataclasses import dataclass

from torch import Tensor

from ztk.zero.layout import BucketLayout, Fragment, Segment
from ztk.zero.store import Slot


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """Elements [start, stop) of a bucket, within one shard.

    segments: the piece, cut by parameter group, in elements of the bucket. fragments: the piece, cut by parameter.
    states: the master weights (unless the parameter is its own master: `has_master` is False), then the optimizer's rows, as
        `StateFormat` lays them out. None if the bucket is frozen.
    gradient: the reduced gradient, if gradients are sharded. parameter: the parameter shard, if parameters are sharded.
    """

    start: int
    stop: int
    segments: tuple[Segment, ...]
    fragments: tuple[Fragment, ...]
    states: Slot | None
    gradient: Slot | None
    parameter: Slot | None
    has_master: bool = False

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of(self, full: Tensor) -> Tensor:
        """This piece of a buffer that spans the bucket: a view [numel]."""
        return full[self.start : self.stop]


def cut_shard(layout: BucketLayout, *, rank: int, piece_size: int | None) -> list[range]:
    """The shard of `rank` as ranges of at most `piece_size` elements; None: as one range."""
    shard = layout.shard(rank)
    step = piece_size or layout.shard_size
    return [range(start, min(start + step, shard.stop)) for start in range(shard.start, shard.stop, step)]
