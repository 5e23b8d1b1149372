"""One flat buffer of parameters: sharded or gathered, its gradient on the way or reduced."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from ztk.runtime import Comm, Tier
from ztk.zero.buffers import BufferPool
from ztk.zero.exchange import Exchange
from ztk.zero.layout import BucketLayout
from ztk.zero.piece import Piece
from ztk.zero.store import Pending, Store


class ParameterState(Enum):
    """Where a bucket's parameters are."""

    sharded = "sharded"  # only the own shard exists; the parameters are placeholders
    gathering = "gathering"  # a whole buffer is allocated and being filled
    gathered = "gathered"  # the parameters are views of the whole buffer


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketTraits:
    """What never changes about a bucket."""

    name: str
    unit: str
    dtype: torch.dtype
    trainable: bool
    shards_parameters: bool
    shards_gradients: bool
    holders: tuple[int, ...] = ()  # pipeline ranks whose gradients of this bucket are added up, see `Part`
    counted: bool = True  # in the norm and in checkpoints; False: another rank outside the shard group holds the same


class Bucket:
    """Owns the whole parameter buffer (when there is one), the gradient buffer (when there is one) and the pieces of its shard."""

    def __init__(
        self,
        traits: BucketTraits,
        *,
        layout: BucketLayout,
        parameters: list[nn.Parameter],
        comm: Comm,
        exchange: Exchange,
        pool: BufferPool,
    ) -> None:
        self.traits, self.layout, self.parameters = traits, layout, parameters
        self.pieces: list[Piece] = []
        self.parameter_store: Store | None = None
        self.state = ParameterState.sharded if traits.shards_parameters else ParameterState.gathered
        self.updated: Future | None = None  # done when the optimizer is done with this bucket; None: it is not running
        self.full: Tensor | None = None  # [layout.size], the parameters
        self.gradient: Tensor | None = None  # [layout.size], the local gradient
        self.comm, self._pool = comm, pool  # among the ranks that share the shards
        self.exchange = exchange  # how the shards travel
        self._work: Pending | None = None
        self._written = [False] * len(parameters)  # whose gradient is in `gradient`
        self._arrived: set[int] = set()  # whose gradient came in this backward

    @property
    def size(self) -> int:
        return self.layout.size

    def own(self, full: Tensor) -> Tensor:
        """This rank's shard of a buffer that spans the bucket."""
        shard = self.layout.shard(self.comm.rank)
        return full[shard.start : shard.stop]

    # Parameters

    @torch.inference_mode(False)
    def start_gather(self) -> None:
        """sharded -> gathering: the own shard is fetched into its place, then all ranks' shards are gathered in place."""
        if self.state is not ParameterState.sharded:
            return
        self.full = self._pool.acquire(self.size, dtype=self.traits.dtype)
        self._work = self.exchange.gather(self.full, label=self.traits.name, after=_ShardFetch(self))
        self.state = ParameterState.gathering

    def fetch_shard(self) -> list[Pending]:
        """Starts to bring the own shard into its place in `full`."""
        return [self.parameter_store.fetch_into(p.parameter, out=p.of(self.full)) for p in self.pieces]

    def wait_for_update(self) -> None:
        """Returns when an optimizer that runs behind the forward is done with this bucket."""
        if (updated := self.updated) is not None:
            updated.result()
            self.updated = None

    def finish_gather(self) -> None:
        """-> gathered: the parameters are usable."""
        if self.state is ParameterState.gathered:
            return
        self.start_gather()
        self._work.wait()
        self._work = None
        self.show_parameters()
        self.state = ParameterState.gathered

    def release(self, *, placeholder: Tensor) -> None:
        """gathered -> sharded: parameters become NaN placeholders that keep their shapes; the buffer returns to the pool."""
        if self.state is ParameterState.sharded:
            return
        if self.state is ParameterState.gathering:
            self._work.wait()
            self._work = None
        for parameter, placement in zip(self.parameters, self.layout.placements, strict=True):
            parameter.data = placeholder.expand(placement.shape)
        self._pool.release(self.full)
        self.full = None
        self.state = ParameterState.sharded

    @torch.inference_mode(False)
    def show_parameters(self) -> None:
        """Makes the parameters views of `full`."""
        for parameter, placement in zip(self.parameters, self.layout.placements, strict=True):
            parameter.data = self.full[placement.offset : placement.stop].view(placement.shape)

    # Gradients

    def accept_gradient(self, index: int, *, acquire: Callable[[], Tensor]) -> None:
        """Moves parameter `index`'s fresh gradient into the flat buffer: copied when it is the first, added when not."""
        parameter, placement = self.parameters[index], self.layout.placements[index]
        if self.gradient is None:
            self.gradient = acquire()
            self._written = [False] * len(self.parameters)
            for gap in self.layout.gaps():
                self.gradient[gap.start : gap.stop].zero_()
        place = self.gradient[placement.offset : placement.stop].view(placement.shape)
        if self._written[index]:
            place.add_(parameter.grad)
        else:
            place.copy_(parameter.grad)
            self._written[index] = True
        parameter.grad = None
        self._arrived.add(index)

    @property
    def has_gradient(self) -> bool:
        """A parameter's local gradient is in the buffer."""
        return self.gradient is not None and any(self._written)

    @property
    def is_complete(self) -> bool:
        """Every parameter's gradient has come in this backward."""
        return len(self._arrived) == len(self.parameters)

    def fill_missing(self, *, acquire: Callable[[], Tensor]) -> None:
        """Parameters that were not used have the gradient zero."""
        if self.gradient is None:
            self.gradient = acquire().zero_()
            return
        for written, placement in zip(self._written, self.layout.placements, strict=True):
            if not written:
                self.gradient[placement.offset : placement.stop].zero_()

    def new_backward(self) -> None:
        """The next backward starts: nobody's gradient has come."""
        self._arrived.clear()

    def forget_gradient(self) -> Tensor | None:
        """Gives the gradient buffer away; the next gradient starts a new one."""
        gradient, self.gradient = self.gradient, None
        return gradient

    def restart_gradient(self) -> None:
        """Keeps the buffer, forgets its content."""
        self._written = [False] * len(self.parameters)


class _ShardFetch:
    """The own shard on its way into the gathered buffer: from now on, or as soon as the optimizer is done with it."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        # Before anything looks whether the update is done, which each rank sees at its own time: this must be the same on all.
        self.is_immediate = bucket.parameter_store.tier is Tier.device and bucket.updated is None
        is_current = bucket.updated is None or bucket.updated.done()
        self._fetches = self._start() if is_current else None

    def _start(self) -> list[Pending]:
        self._bucket.wait_for_update()
        return self._bucket.fetch_shard()

    def wait(self) -> None:
        for fetch in self._start() if self._fetches is None else self._fetches:
            fetch.wait()
