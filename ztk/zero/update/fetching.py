"""Fetches pieces into memory: the next pieces are fetched while the current one is updated.

[Note: States ahead]
Reading states is a third of a step's disk traffic, and the disk is nearly idle in the backward. So whenever a bucket is
reduced, the states of as many pieces are prefetched as the pool has room for. The update then finds them in memory.

States and gradients have the dtypes in which they are stored.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.core.runtime import Tier
from ztk.core.runtime.buffers import BufferPool
from ztk.core.runtime.pending import Pending
from ztk.core.runtime.planned import is_planned
from ztk.core.runtime.store import Slot
from ztk.core.runtime.streams import Copy, has_streams, start_copy
from ztk.optim.states import MASTER
from ztk.zero.buckets.bucket import Bucket
from ztk.zero.buckets.context import ZeroContext
from ztk.zero.buckets.piece import Piece

MAX_FETCHED = 8  # pieces, including the current one: keeps requests queued at the disk
MAX_WRITES = 8  # pieces being written back while later ones are updated


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedPiece:
    """A piece whose gradient and states, or the momentum of its matrices, are being fetched.

    parameter: if the parameter is its own master weight and on NVMe, its fetch into a buffer of the pool. staged: a gradient being copied
    from the device to a buffer of the pool.
    """

    bucket: Bucket
    piece: Piece
    states: Pending
    gradient: Pending | None
    parameter: Pending | None = None
    staged: tuple[Tensor, Copy] | None = None

    def wait(self) -> tuple[Tensor, Tensor]:
        """Waits for the stored states and the gradient [n], in the memory where the update runs."""
        states = self.states.wait()
        if self.staged is not None:
            gradient, copy = self.staged
            copy.synchronize()
            return states, gradient
        gradient = self.gradient.wait() if self.gradient else self.piece.of(self.bucket.gradient.full)
        assert gradient is not None
        return states, gradient


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedStates:
    """A piece in memory. master: float32 [n]; rows: the optimizer's states, float32 [n], which may be changed; gradient: [n]."""

    bucket: Bucket
    piece: Piece
    master: Tensor
    rows: dict[str, Tensor]
    gradient: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedMomentum:
    """A piece with the momentum of its matrices in memory. momentum: float32, laid out by `piece.moments`, which may be changed; gradient:
    [n]."""

    piece: Piece
    momentum: Tensor
    gradient: Tensor


class PieceFetcher:
    """Fetches pieces in order, from any store. pools: hold buffers outside of the optimizer's states, see `pool_of`."""

    def __init__(self, context: ZeroContext) -> None:
        self._offloaded, self._format, self._clock = context.stores.optimizer, context.states, context.clock
        self._device_pool = self._host_pool = _pool(context, tier=Tier.device)
        if context.stores.updates_on_host and context.device.type != "cpu":
            self._host_pool = _pool(context, tier=Tier.host)
        self.pools = (self._device_pool, self._host_pool)
        self._ahead: dict[Slot | None, Pending] = {}  # prefetched states

    # Before the update

    def pool_of(self, piece: Piece) -> BufferPool:
        """The pool of buffers in the memory where `piece` is updated."""
        return self._host_pool if piece.stores.updates_on_host else self._device_pool

    def fetch_ahead(self, slots: Sequence[Slot | None]) -> None:
        """Prefetches the first of `slots` that fit, see [Note: States ahead]. slots: slots of offloaded states, in the order of use."""
        for slot in slots[len(self._ahead) :]:
            pending = self._offloaded.fetch_ahead(slot)
            if pending is None:
                return
            self._ahead[slot] = pending

    def drop_ahead(self) -> None:
        """Releases prefetched states, because no update will use them."""
        for slot in self._ahead:
            self._offloaded.release(slot)
        self._ahead.clear()

    # In the update

    def fetch(self, pieces: Iterable[tuple[Bucket, Piece]], *, momentum: bool = False) -> Iterator[FetchedPiece]:
        """Yields pieces in order. The next one is fetched while a piece is updated, and more if the store has room.

        momentum: fetches the momentum of matrices instead of the states.
        """
        todo = deque(pieces)
        fetched: deque[FetchedPiece] = deque()
        while todo or fetched:
            while todo and len(fetched) < (MAX_FETCHED if self._has_room(todo[0][1], momentum=momentum) else 2):
                bucket, piece = todo.popleft()
                fetched.append(self._start(bucket, piece=piece, momentum=momentum))
            yield fetched.popleft()

    def fetch_states(self, pieces: Iterable[tuple[Bucket, Piece]]) -> Iterator[FetchedStates]:
        """The states of pieces, before the update, each written back after its turn. Gradients are not moved."""
        for bucket, piece, states, gradient in self._passing(pieces, momentum=False):
            rows = self.rows(piece, states=states)
            master = rows.pop(MASTER) if MASTER in rows else self.resident_parameter(bucket, piece=piece)
            assert master is not None, "fp32 parameters on a disk have master weights"
            yield FetchedStates(bucket=bucket, piece=piece, master=master, rows=rows, gradient=gradient)

    def fetch_momentum(self, pieces: Iterable[tuple[Bucket, Piece]]) -> Iterator[FetchedMomentum]:
        """Yields the pieces of `fetch_states` with the momentum of matrices only."""
        for _, piece, momentum, gradient in self._passing(pieces, momentum=True):
            yield FetchedMomentum(piece=piece, momentum=momentum, gradient=gradient)

    def _passing(
        self, pieces: Iterable[tuple[Bucket, Piece]], *, momentum: bool
    ) -> Iterator[tuple[Bucket, Piece, Tensor, Tensor]]:
        """Bucket, piece, its stored states and gradient [n], in the memory where the update runs. The states are written back after the
        turn."""
        writes: deque[Pending] = deque()
        for fetched in self.fetch(pieces, momentum=momentum):
            piece = fetched.piece
            with self._clock.phase("io"):
                stored, gradient = fetched.wait()
            yield fetched.bucket, piece, stored, gradient
            writes.append(piece.stores.optimizer.put(_slot(piece, momentum=momentum), value=stored))
            if len(writes) > MAX_WRITES:
                writes.popleft().wait()
            if piece.gradient is not None:
                piece.stores.gradients.release(piece.gradient)
            self.release_staged(fetched)
        for write in writes:
            write.wait()

    def release_staged(self, fetched: FetchedPiece) -> None:
        """Frees the staged gradient."""
        if fetched.staged is not None:
            self.pool_of(fetched.piece).release(fetched.staged[0])

    def rows(self, piece: Piece, *, states: Tensor) -> dict[str, Tensor]:
        """The rows of a piece's stored states, of any shape, by name: views."""
        given = {"numel": piece.numel, "has_master": piece.has_master, "with_rows": piece.with_rows}
        return self._format.views(states, **given)

    def resident_parameter(self, bucket: Bucket, *, piece: Piece) -> Tensor | None:
        """The parameter's memory [n], if it can be written in place."""
        if not bucket.traits.shards_parameters:
            return piece.of(bucket.full)
        if piece.stores.parameters.tier is Tier.nvme:
            return None
        return piece.stores.parameters.fetch(piece.parameter).wait()

    def _has_room(self, piece: Piece, *, momentum: bool) -> bool:
        slot = _slot(piece, momentum=momentum)
        return slot in self._ahead or piece.stores.optimizer.has_room(slot)

    def _start(self, bucket: Bucket, *, piece: Piece, momentum: bool) -> FetchedPiece:
        gradient, staged, stores = None, None, piece.stores
        if piece.gradient is not None:
            gradient = stores.gradients.fetch(piece.gradient)
        elif stores.updates_on_host:
            staged = self._stage(piece.of(bucket.gradient.full))
        slot = _slot(piece, momentum=momentum)
        states = self._ahead.pop(slot, None) or stores.optimizer.fetch(slot)
        parameter = None
        is_own_master = not (momentum or piece.has_master) and piece.parameter is not None
        if is_own_master and stores.parameters.tier is Tier.nvme:
            memory = self.pool_of(piece).acquire(piece.numel, dtype=bucket.traits.dtype)
            parameter = stores.parameters.fetch_into(piece.parameter, out=memory)
        return FetchedPiece(
            bucket=bucket, piece=piece, states=states, gradient=gradient, parameter=parameter, staged=staged
        )

    def _stage(self, gradient: Tensor) -> tuple[Tensor, Copy] | None:
        """Starts to copy a gradient [n] from a GPU to the host. None if it is on the host already."""
        if not has_streams(gradient):
            return None
        buffer = self._host_pool.acquire(gradient.numel(), dtype=gradient.dtype)
        copy = start_copy(gradient, out=buffer)
        assert copy is not None, "one of the two is on a GPU"
        return buffer, copy


def _pool(context: ZeroContext, *, tier: Tier) -> BufferPool:
    """A pool in device or main memory."""
    in_main_memory = tier is Tier.host and not is_planned(context.device)
    return BufferPool(
        device=torch.device("cpu") if in_main_memory else context.device,
        ledger=context.ledger,
        category="parameters on their way",
        tier=tier,
    )


def _slot(piece: Piece, *, momentum: bool) -> Slot | None:
    return piece.momentum if momentum else piece.states
