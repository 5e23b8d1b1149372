"""The optimizer step over shards, wherever they sleep.

Phases, per piece: fetch the next piece, update this one, put the last one back. On the device and in host memory fetch and put are free; from
NVMe the three overlap. The arithmetic is elementwise, so cutting a shard into pieces, or updating all shards on every rank
(stage 0), gives the same bits as updating one's own shard in one call.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.kernels import Control
from ztk.optim import FlatOptimizer
from ztk.runtime import Comm, PhaseClock, Tier
from ztk.zero.bucket import Bucket
from ztk.zero.piece import Piece
from ztk.zero.store import Pending, Store

PUTS_IN_FLIGHT = 2  # pieces that may be on their way back while later ones are updated


@dataclass(frozen=True, kw_only=True, slots=True)
class Stores:
    """Which store keeps which kind of state."""

    optimizer: Store
    gradients: Store
    parameters: Store


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fetched:
    """A piece whose states and gradient are on their way or here."""

    bucket: Bucket
    piece: Piece
    states: Pending
    gradient: Pending | None


class ShardUpdate:
    """Runs the optimizer over all pieces that this rank updates."""

    def __init__(
        self,
        buckets: list[Bucket],
        *,
        optimizer: FlatOptimizer,
        stores: Stores,
        comm: Comm,
        clock: PhaseClock,
    ) -> None:
        self._buckets, self._optimizer, self._stores = buckets, optimizer, stores
        self._comm, self._clock = comm, clock
        self._on_host = stores.optimizer.tier is not Tier.device  # then the update runs where the states are

    def run(self, control: Tensor) -> None:
        """control: [groups, 16] fp32 of `step_control`. Parameters are new on all ranks when this returns.

        With offloaded states the update runs on the host and one copy of `control` to the host waits for the device.
        """
        gathers = []
        if self._on_host:
            control = control.cpu()
            if bool(control[0, Control.skip]):  # skip: nothing is read from or written to the medium
                return
        puts: deque[tuple[Pending, ...]] = deque()
        fetched = self._fetch_ahead()
        for current in fetched:
            puts.append(self._update(current, control=control))
            if len(puts) > PUTS_IN_FLIGHT:
                self._wait(puts.popleft())
            if current.piece is current.bucket.pieces[-1] and self._needs_gather(current.bucket):
                gathers.append(self._comm.all_gather(current.bucket.full, label=current.bucket.traits.name))
        for put in puts:
            self._wait(put)
        with self._clock.phase("communication"):
            for gather in gathers:
                gather.wait()

    def _needs_gather(self, bucket: Bucket) -> bool:
        """The parameters are replicated, but every rank updated its own part only."""
        updated = sum(piece.stop - piece.start for piece in bucket.pieces)
        return not bucket.traits.shards_parameters and updated < bucket.size

    def _fetch_ahead(self) -> Iterator[_Fetched]:
        """Pieces in order, each fetched while the one before is updated."""
        ahead: _Fetched | None = None
        for bucket in self._buckets:
            for piece in bucket.pieces:
                current, ahead = ahead, self._fetch(bucket, piece=piece)
                if current is not None:
                    yield current
        if ahead is not None:
            yield ahead

    def _fetch(self, bucket: Bucket, *, piece: Piece) -> _Fetched:
        gradient = None if piece.gradient is None else self._stores.gradients.fetch(piece.gradient)
        return _Fetched(
            bucket=bucket, piece=piece, states=self._stores.optimizer.fetch(piece.states), gradient=gradient
        )

    def _update(self, fetched: _Fetched, *, control: Tensor) -> tuple[Pending, ...]:
        bucket, piece = fetched.bucket, fetched.piece
        with self._clock.phase("io"):
            states = fetched.states.wait()
            gradient = fetched.gradient.wait() if fetched.gradient else piece.of(bucket.gradient)
        if self._on_host:
            gradient = gradient.cpu()
        master, moments, out = self._views(bucket, piece=piece, states=states)
        for segment in piece.segments:
            cut = slice(segment.start - piece.start, segment.stop - piece.start)
            self._optimizer.step(
                master[cut],
                grad=gradient[cut],
                states=tuple(moment[cut] for moment in moments),
                control=control[segment.group],
                out=None if out is None else out[cut],
            )
        return self._put(bucket, piece=piece, states=states, out=out)

    def _views(
        self, bucket: Bucket, *, piece: Piece, states: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
        """The master weights, the moments, and where the optimizer writes the parameter (None: master and parameter are one)."""
        num_moments = len(self._optimizer.state_names)
        moments = tuple(states[states.shape[0] - num_moments :])
        if states.shape[0] == num_moments:
            return self._resident_parameter(bucket, piece=piece), moments, None
        resident = self._resident_parameter(bucket, piece=piece)
        if resident is not None and resident.device == states.device:
            return states[0], moments, resident
        out = torch.empty(piece.stop - piece.start, dtype=bucket.traits.dtype, device=states.device)
        return states[0], moments, out

    def _resident_parameter(self, bucket: Bucket, *, piece: Piece) -> Tensor | None:
        """The parameter's own memory, if it can be written in place."""
        if not bucket.traits.shards_parameters:
            return piece.of(bucket.full)
        if self._stores.parameters.tier is Tier.nvme:
            return None
        return self._stores.parameters.fetch(piece.parameter).wait()

    def _put(self, bucket: Bucket, *, piece: Piece, states: Tensor, out: Tensor | None) -> tuple[Pending, ...]:
        puts = [self._stores.optimizer.put(piece.states, value=states)]
        if piece.gradient is not None:
            self._stores.gradients.release(piece.gradient)
        if out is None:
            return tuple(puts)
        if bucket.traits.shards_parameters:
            puts.append(self._stores.parameters.put(piece.parameter, value=out))
        elif out.device != bucket.full.device:
            piece.of(bucket.full).copy_(out)
        return tuple(puts)

    def _wait(self, puts: tuple[Pending, ...]) -> None:
        with self._clock.phase("io"):
            for put in puts:
                put.wait()
