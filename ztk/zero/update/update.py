"""The optimizer step over shards, wherever they are stored.

Phases, per piece: fetch the next piece, update this one, write the last one back. On the device and in host memory fetching and writing
back are free; with NVMe the three overlap. The arithmetic is elementwise, so cutting a shard into pieces, or updating all shards on every
rank (stage 0), gives the same bits as updating the rank's shard in one call.

[Note: Update during the forward]
Offloaded states with sharded parameters (stage 3) are updated by a thread while the next forward already runs: the states are 24 of the 34
bytes per parameter that a step moves over the disk, and clipping needs the end of the backward. Buckets whose parameters are
full on every rank are updated at once: the thread may not gather, because ranks must agree on the order of collectives. A bucket's
`residency.updated` future is done when its last parameter write is submitted. Gathering the bucket waits for it, and the store keeps the
order of write and read. All other access to states calls `finish` first.

[Note: Asynchronous writes]
The next forward waits for updated parameters, not for states that are written back. So the update continues while writes queue up, and the
backward gives time for the rest. A store reads before it writes, and its memory limits both.
"""

import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ztk.core.runtime import PhaseClock, Tier
from ztk.core.runtime.buffers import BufferPool
from ztk.core.runtime.pending import Handle, Pending
from ztk.core.runtime.planned import in_one_memory, is_planned, is_set, on_host
from ztk.core.runtime.ranges import named
from ztk.core.runtime.serial import InlineCalls, SerialThread
from ztk.core.runtime.streams import Copy, start_copy
from ztk.kernels import Control, behind_step
from ztk.optim import FlatOptimizer, TorchStep, WholeStep
from ztk.optim.ema import update_average
from ztk.optim.states import MASTER
from ztk.zero.buckets.bucket import Bucket
from ztk.zero.buckets.context import AVERAGE, ZeroContext
from ztk.zero.buckets.piece import Piece
from ztk.zero.update.control_tables import ControlTables
from ztk.zero.update.fetching import MAX_WRITES, FetchedPiece, PieceFetcher
from ztk.zero.update.matrices import MatrixUpdate
from ztk.zero.update.missed import MissedUpdates
from ztk.zero.update.norms import TrustRatios
from ztk.zero.update.piece_states import PieceStates
from ztk.zero.update.piece_update import PieceUpdate, TorchPieceUpdate
from ztk.zero.update.whole import WholeUpdate


@dataclass(frozen=True, kw_only=True, slots=True)
class _WriteBack:
    """An updated piece that is being written back. parameter: its new values in a buffer of the pool, or None if updated in place.
    copy: from that buffer to the device, or None if the target is a store or the copy is done."""

    puts: tuple[Pending, ...]
    parameter: Tensor | None
    pool: BufferPool
    copy: Copy | None = None


class ShardUpdate:
    """Runs the optimizer over all pieces that this rank updates.

    pools: hold buffers outside of the optimizer's states. missed: the updates that parameters have missed.
    """

    def __init__(self, buckets: list[Bucket], *, context: ZeroContext) -> None:
        """buckets: the trained ones, in the order of the update."""
        self._optimizer, self._clock = context.optimizer, context.clock
        self._ema, self._averages, self._states = context.ema, False, PieceStates(context)
        self._fetcher = PieceFetcher(context)
        self.pools = self._fetcher.pools
        offloaded = [bucket for bucket in buckets if any(piece.stores.updates_on_host for piece in bucket.pieces)]
        self._updates_on_host = bool(offloaded)
        self._behind = [bucket for bucket in offloaded if bucket.traits.shards_parameters]
        self._at_once = [bucket for bucket in buckets if bucket not in self._behind]
        # The optimizer leaves the pool's buffer undefined when a step is skipped, and then it must not be written back.
        self._must_know_of_skips = (
            self._updates_on_host
            or context.stores.parameters.tier is not Tier.device
            or not isinstance(context.optimizer, FlatOptimizer)  # torch's steps ignore the control table
        )
        self._matrices: MatrixUpdate | None = None
        if isinstance(context.optimizer, FlatOptimizer) and context.optimizer.muon is not None:
            self._matrices = MatrixUpdate(buckets, muon=context.optimizer.muon, fetcher=self._fetcher, context=context)
            self._must_know_of_skips = True
        self._norms: TrustRatios | None = None
        if isinstance(context.optimizer, FlatOptimizer) and context.optimizer.lamb is not None:
            self._norms = TrustRatios(
                [*self._at_once, *self._behind], lamb=context.optimizer.lamb, fetcher=self._fetcher, context=context
            )
            self._must_know_of_skips = True
        self.whole: WholeUpdate | None = None
        if isinstance(context.optimizer, WholeStep):
            in_order = [*self._at_once, *self._behind]
            self.whole = WholeUpdate(in_order, step=context.optimizer, context=context)
        self._thread = _new_thread(context.device) if self._behind and self.whole is None else None
        self._running: Future | None = None
        self._before_change: Callable[[], None] | None = None
        self._skipped: frozenset[str] = frozenset()
        self.missed = MissedUpdates(context.groups.rows)
        self._piece_update: PieceUpdate | TorchPieceUpdate
        if isinstance(context.optimizer, TorchStep):
            self._piece_update = TorchPieceUpdate(context.optimizer)
        elif isinstance(context.optimizer, FlatOptimizer):
            self._piece_update = PieceUpdate(
                context.optimizer, groups=context.groups, missed=self.missed, norms=self._norms
            )
        self._corrects_bias = "exp_avg_sq" in context.optimizer.state_names
        self.take_over: weakref.WeakMethod | None = None  # takes over a script's writes into parameters
        # The first pieces to fetch: a store assigns memory in this order.
        pieces = self._pieces_of((*self._at_once, *self._behind)) if self._matrices is None else self._matrices.pieces
        self._first = [
            piece.states if self._matrices is None else piece.momentum
            for _, piece in pieces
            if piece.stores.updates_on_host
        ]
        self._overlaps_gather = context.policy.overlap_gather
        self._is_fetching = False  # the background update has not fetched all pieces yet

    def fetch_ahead(self) -> None:
        """Prefetches the states of the first pieces that fit. Does nothing while the last update still fetches."""
        if not self._is_fetching and self.whole is None:
            self._fetcher.fetch_ahead(self._first)

    def run(
        self,
        control: Tensor,
        *,
        skipped: frozenset[str] = frozenset(),
        averages: bool = False,
        evaluate: Callable[[], Any] | None = None,
        after_write: Callable[[], None] = lambda: None,
    ) -> None:
        """Updates all parameters; later uses of them wait for their update. control: [groups, 16] fp32, of `step_control`.

        skipped: names of parameters that keep their values and states. averages: also updates the average of the weights. evaluate,
        after_write: see `WholeUpdate.run`.

        Offloaded states are updated on the host, and a copy of `control` to the host waits for the device. If parameters
        are written to a store, the host waits for the decision to skip.
        """
        self._join()
        self._skipped, self._averages = skipped, averages
        host = None
        if self._updates_on_host:
            host = on_host(control, name="decision to step: states are updated on the host")
        tables = ControlTables(device=control, host=host)
        # Missed updates are also counted here.
        must_know = self._must_know_of_skips or (self._corrects_bias and skipped)
        if must_know and is_set(
            tables.nearest[0, Control.skip], name="decision to step: the optimizer does not read it"
        ):
            self._fetcher.drop_ahead()  # without any access to the medium
            return
        if self.whole is not None:
            self.whole.run(control, skipped=skipped, averages=averages, evaluate=evaluate, after_write=after_write)
            return
        if isinstance(self._optimizer, TorchStep):
            self._optimizer.begin_step()
        elif self._corrects_bias:
            self.missed.note(skipped)
        for bucket in (*self._at_once, *self._behind):
            bucket.exchange.invalidate()
        if self._matrices is not None:
            self._matrices.run(tables, skipped=skipped)
        if self._norms is not None:
            self._norms.run(tables, skipped=skipped)
        self._update_all(self._at_once, tables=tables, clock=self._clock)
        if self._thread is None:
            return
        for bucket in self._behind:
            bucket.residency.updated = Future()
        self._is_fetching = True
        self._running = self._thread.submit(behind_step(functools.partial(self._update_behind, tables.clone())))

    def finish(self) -> None:
        """Takes over a script's writes, then calls `finish_running`."""
        self._take_over()
        self.finish_running()

    def _take_over(self) -> None:
        take_over = self.take_over and self.take_over()
        if take_over is not None:
            take_over()

    def finish_running(self) -> None:
        """Waits for the last update and its writes, and drops prefetched states. Raises the update's error."""
        self._join()
        self._fetcher.drop_ahead()

    def before_change(self, action: Callable[[], None]) -> None:
        """Calls `action()` once before states change, to wait for another thread that reads them."""
        self._take_over()
        self._before_change = action

    def await_last(self) -> None:
        """Waits for the last update, in a thread that reads states. Raises the update's error."""
        running = self._running
        if running is not None:
            running.result()

    def close(self) -> None:
        """Ends the last update and the thread. Raises the update's error."""
        try:
            self.finish_running()
        finally:
            if self._thread is not None:
                self._thread.close()
                self._thread = None

    def _join(self) -> None:
        action, self._before_change = self._before_change, None
        if action is not None:
            with self._clock.phase("io"):
                action()
        running, self._running = self._running, None
        if running is not None:
            with self._clock.phase("io"):
                running.result()

    def _update_behind(self, tables: ControlTables) -> None:
        """See [Note: Update during the forward]."""
        try:  # a separate clock: this time overlaps with the forward and is not part of the step's
            self._update_all(self._behind, tables=tables, clock=PhaseClock())
        except BaseException as error:
            for bucket in self._behind:
                updated = bucket.residency.updated  # None if the update is done and was waited for
                if updated is not None and not updated.done():
                    updated.set_exception(error)
            self._is_fetching = False
            raise

    def _update_all(self, buckets: list[Bucket], *, tables: ControlTables, clock: PhaseClock) -> None:
        gathers, writes = [], deque()
        overlaps = self._overlaps_gather and not _something_is_compiled()
        for current in self._fetcher.fetch(self._pieces_of(buckets)):
            writes.append(self._update(current, control=tables.of(current.piece), clock=clock))
            if len(writes) > MAX_WRITES:
                self._finish_write(writes.popleft(), clock=clock)
            bucket = current.bucket
            if current.piece is bucket.pieces[-1]:
                if _needs_gather(bucket):
                    expects = overlaps and not bucket.residency.is_viewed
                    copy = writes[-1].copy  # the bucket's last copy; the others precede it on the stream
                    after = None if copy is None else Handle(finish=copy.wait, is_immediate=True)
                    gather = bucket.comm.all_gather(bucket.full, label=bucket.traits.name, after=after)
                    gathers.append((bucket, gather, expects))
                if bucket.residency.updated is not None:
                    bucket.residency.updated.set_result(None)
        self._is_fetching = False
        for write in writes:
            self._finish_write(write, clock=clock)
        with clock.phase("communication"):
            for bucket, gather, expects in gathers:
                if expects:
                    bucket.residency.expect(gather, clock=clock)
                else:
                    gather.wait()

    # Phases of one piece

    @staticmethod
    def _pieces_of(buckets: Iterable[Bucket]) -> list[tuple[Bucket, Piece]]:
        return [(bucket, piece) for bucket in buckets for piece in bucket.pieces]

    def _update(self, fetched: FetchedPiece, *, control: Tensor, clock: PhaseClock) -> _WriteBack:
        bucket, piece = fetched.bucket, fetched.piece
        with clock.phase("io"):
            states, gradient = fetched.wait()
            own = None if fetched.parameter is None else fetched.parameter.wait()
        rows = self._fetcher.rows(piece, states=states)
        average = rows.pop(AVERAGE, None)
        resident = self._fetcher.resident_parameter(bucket, piece=piece) if own is None else None
        if MASTER not in rows:
            master, out = (resident if own is None else own), None  # the parameter is its own master weight
        elif resident is not None and in_one_memory(resident, second=states):
            master, out = rows.pop(MASTER), resident
        else:
            master, out = rows.pop(MASTER), self._fetcher.pool_of(piece).acquire(piece.numel, dtype=bucket.traits.dtype)
        assert master is not None, "present while the update runs"
        with named(f"update {bucket.traits.name}"):
            self._piece_update.run(
                piece, master=master, gradient=gradient, rows=rows, control=control, out=out, skipped=self._skipped
            )
        if self._averages and average is not None:
            self._update_average(average, weights=master, control=control)
        elif self._averages:
            with self._states.average(piece, changes=True) as apart:
                self._update_average(apart[AVERAGE], weights=master.to(apart[AVERAGE].device), control=control)
        self._fetcher.release_staged(fetched)
        return self._write_back(bucket, piece=piece, states=states, out=out if own is None else own)

    def _update_average(self, average: Tensor, *, weights: Tensor | None, control: Tensor) -> None:
        """See `update_average`. If the host reads the skip decision, skipped steps never get here."""
        assert weights is not None and self._ema is not None
        skip = None if self._must_know_of_skips else control[0, Control.skip].to(average.device)
        update_average(average, weights=weights, decay=self._ema.decay, skip=skip)

    def _write_back(self, bucket: Bucket, *, piece: Piece, states: Tensor, out: Tensor | None) -> _WriteBack:
        puts = [piece.stores.optimizer.put(piece.states, value=states)]
        if piece.gradient is not None:
            piece.stores.gradients.forget(piece.gradient)
        if out is not None and bucket.traits.shards_parameters:
            puts.append(piece.stores.parameters.put(piece.parameter, value=out))
        pool = self._fetcher.pool_of(piece)
        parameter = out if pool.owns(out) else None
        copy = None
        if parameter is not None and not bucket.traits.shards_parameters:
            copy = start_copy(parameter, out=piece.of(bucket.full))
            if copy is None:
                piece.of(bucket.full).copy_(parameter)
        return _WriteBack(puts=tuple(puts), parameter=parameter, pool=pool, copy=copy)

    def _finish_write(self, write: _WriteBack, *, clock: PhaseClock) -> None:
        with clock.phase("io"):
            for put in write.puts:
                put.wait()
            if write.copy is not None:
                write.copy.wait()
                write.copy.synchronize()  # before the host writes into its buffer again
        if write.parameter is not None:
            write.pool.release(write.parameter)


def _something_is_compiled() -> bool:
    """Whether torch.compile was called in this process. Compiled code reads parameters without interception, and guards on their
    classes."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and any(backend is not None for backend in frames.cached_backends.values())


def _new_thread(device: torch.device) -> SerialThread | InlineCalls:
    """The thread that runs the update during the forward."""
    return InlineCalls() if is_planned(device) else SerialThread(name="ztk-update")


def _needs_gather(bucket: Bucket) -> bool:
    """Whether the parameters are full on every rank, but each rank updated its own part only."""
    updated = sum(piece.numel for piece in bucket.pieces)
    return not bucket.traits.shards_parameters and updated < bucket.size
