"""A piece: the range of a bucket that is fetched, updated and written back at once.

Views have the dtype of their buffer.
"""

from dataclasses import dataclass

from torch import Tensor

from ztk.core.runtime.store import Slot, Stores
from ztk.zero.buckets.layout import BucketLayout, Fragment, Segment
from ztk.zero.buckets.moments import Moments


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """Elements [start, stop) of a bucket, within one shard.

    stores: hold the piece's slots.
    segments: the piece, cut by parameter group, in elements of the bucket. fragments: the piece, cut by parameter.
    states: the master weights (unless the parameter is its own master: `has_master` is False), then the optimizer's rows, as
        `StateFormat` lays them out. None if the bucket is frozen.
    gradient: the reduced gradient, if gradients are sharded. parameter: the parameter shard, if parameters are sharded.
    average: the weights' average, fp32, if it is stored on another tier than the states.
    moments: layout of Muon's states. momentum: its matrices' momentum in fp32. None if the piece has no matrices, and all elements have all
    rows.
    """

    start: int
    stop: int
    stores: Stores
    segments: tuple[Segment, ...]
    fragments: tuple[Fragment, ...]
    states: Slot | None
    gradient: Slot | None
    parameter: Slot | None
    has_master: bool = False
    average: Slot | None = None
    moments: Moments | None = None
    momentum: Slot | None = None

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def with_rows(self) -> int | None:
        """Elements that have the optimizer's rows, as `StateFormat` expects it, or None for all."""
        return None if self.moments is None else self.moments.num_moments

    def of(self, full: Tensor) -> Tensor:
        """This piece of a buffer that spans the bucket: a view [numel]."""
        return full[self.start : self.stop]


def cut_shard(layout: BucketLayout, *, rank: int, piece_size: int | None) -> list[range]:
    """The shard of `rank` as ranges of at most `piece_size` elements. If None, as one range."""
    shard = layout.shard(rank)
    step = piece_size or layout.shard_size
    return [range(start, min(start + step, shard.stop)) for start in range(shard.start, shard.stop, step)]
