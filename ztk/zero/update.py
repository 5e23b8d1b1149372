"""The optimizer step over shards, wherever they sleep.

Phases, per piece: fetch the next piece, update this one, put the last one back. On the device and in host memory fetch and put are free; from
NVMe the three overlap. The arithmetic is elementwise, so cutting a shard into pieces, or updating all shards on every rank
(stage 0), gives the same bits as updating one's own shard in one call.

[Note: Update behind the forward]
Offloaded states with sharded parameters (stage 3) are updated by a thread while the next forward already runs: the states are 24 of the 34
bytes per parameter that a step moves over the disk, and clipping forbids to start before the backward has ended. Buckets whose
parameters are whole on every rank are updated at once: the thread may not gather, because ranks must agree on the order. A bucket's
`updated` future is done when its last parameter write is submitted; gathering the bucket waits for it, and the store keeps the
order of write and read. Everything else that touches states calls `finish` first.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from ztk.kernels import Control
from ztk.optim import FlatOptimizer
from ztk.runtime import PhaseClock, Tier
from ztk.runtime.serial import SerialThread
from ztk.zero.bucket import Bucket
from ztk.zero.buffers import BufferPool
from ztk.zero.piece import Piece
from ztk.zero.store import Pending, Store

# [Note: States ahead]
# A third of what a step moves over the disk is reading states, and the disk is nearly idle in the backward. So when a bucket is
# reduced, as many pieces' states are fetched as the pool has room for. The update finds them there.
#
# [Note: Writes behind]
# The next forward waits for updated parameters, not for what is written back: so the update goes on while writes queue up, and the backward
# has time for what is left of them. A store reads before it writes, and its memory bounds both.

PUTS_IN_FLIGHT = 8  # pieces that may be on their way back while later ones are updated
MOST_FETCHED = 8  # pieces, the one that is updated among them: the disk has the next at hand when one is read


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Away:
    """An updated piece on its way back. borrowed: the parameter's new values, in a passing buffer."""

    puts: tuple[Pending, ...]
    borrowed: Tensor | None


class ShardUpdate:
    """Runs the optimizer over all pieces that this rank updates."""

    def __init__(
        self,
        buckets: list[Bucket],
        *,
        optimizer: FlatOptimizer,
        stores: Stores,
        passing: BufferPool,  # in the memory of the optimizer states
        clock: PhaseClock,
    ) -> None:
        self._optimizer, self._stores, self._passing = optimizer, stores, passing
        self._clock = clock
        self._on_host = stores.optimizer.tier is not Tier.device  # then the update runs where the states are
        self._behind = [bucket for bucket in buckets if self._on_host and bucket.traits.shards_parameters]
        self._at_once = [bucket for bucket in buckets if bucket not in self._behind]
        # The optimizer leaves a passing buffer as it was when a step is skipped, and that must not be put anywhere.
        self._must_know_of_skips = self._on_host or stores.parameters.tier is not Tier.device
        self._thread = SerialThread(name="ztk-update") if self._behind else None
        self._running: Future | None = None
        self._holder: Callable[[], None] | None = None
        self._pieces = [piece for bucket in (*self._at_once, *self._behind) for piece in bucket.pieces]
        self._ahead: dict[Piece, Pending] = {}
        self._is_fetching = False  # the update that runs behind the forward has not fetched everything yet

    def fetch_ahead(self) -> None:
        """See [Note: States ahead]. Nothing while the last update still fetches."""
        if self._is_fetching:
            return
        for piece in self._pieces[len(self._ahead) :]:
            pending = self._stores.optimizer.fetch_ahead(piece.states)
            if pending is None:
                return
            self._ahead[piece] = pending

    def drop_ahead(self) -> None:
        """There will be no update with what was fetched ahead."""
        for piece in self._ahead:
            self._stores.optimizer.release(piece.states)
        self._ahead.clear()

    def run(self, control: Tensor) -> None:
        """control: [groups, 16] fp32 of `step_control`. What uses the parameters next finds them updated.

        With offloaded states the update runs on the host and one copy of `control` to the host waits for the device; with parameters
        that are put somewhere the host waits for the decision to skip.
        """
        self._join()
        if self._on_host:
            control = control.cpu()
        if self._must_know_of_skips and bool(control[0, Control.skip]):
            self.drop_ahead()  # and nothing is read from or written to the medium
            return
        for bucket in (*self._at_once, *self._behind):
            bucket.exchange.forget()
        self._update_all(self._at_once, control=control, clock=self._clock)
        if self._thread is None:
            return
        for bucket in self._behind:
            bucket.updated = Future()
        # Its seconds are hidden behind the forward: on a clock of its own they do not count as the step's.
        self._is_fetching = True
        self._running = self._thread.submit(functools.partial(self._update_behind, control.clone()))

    def finish(self) -> None:
        """The last update has ended, writes included, and nothing is fetched ahead. Raises what went wrong in it."""
        self._join()
        self.drop_ahead()

    def delay(self, until: Callable[[], None]) -> None:
        """States are read from another thread: before they change, `until()` waits for that."""
        self._holder = until

    def await_last(self) -> None:
        """For that other thread: returns when the last update has ended. Raises what went wrong in it."""
        running = self._running
        if running is not None:
            running.result()

    def _join(self) -> None:
        holder, self._holder = self._holder, None
        if holder is not None:
            with self._clock.phase("io"):
                holder()
        running, self._running = self._running, None
        if running is not None:
            with self._clock.phase("io"):
                running.result()

    def close(self) -> None:
        """Ends the last update and the thread."""
        try:
            self.finish()
        finally:
            if self._thread is not None:
                self._thread.close()
                self._thread = None

    def _update_behind(self, control: Tensor) -> None:
        """See [Note: Update behind the forward]."""
        try:
            self._update_all(self._behind, control=control, clock=PhaseClock())
        except BaseException as error:
            for bucket in self._behind:
                updated = bucket.updated  # None: done and already waited for
                if updated is not None and not updated.done():
                    updated.set_exception(error)
            self._is_fetching = False
            raise

    def _update_all(self, buckets: list[Bucket], *, control: Tensor, clock: PhaseClock) -> None:
        gathers, puts = [], deque()
        for current in self._fetch_ahead(buckets):
            puts.append(self._update(current, control=control, clock=clock))
            if len(puts) > PUTS_IN_FLIGHT:
                self._wait(puts.popleft(), clock=clock)
            if current.piece is current.bucket.pieces[-1]:
                if self._needs_gather(current.bucket):
                    gathers.append(
                        current.bucket.comm.all_gather(current.bucket.full, label=current.bucket.traits.name)
                    )
                if current.bucket.updated is not None:
                    current.bucket.updated.set_result(None)
        self._is_fetching = False
        for away in puts:
            self._wait(away, clock=clock)
        with clock.phase("communication"):
            for gather in gathers:
                gather.wait()

    def _needs_gather(self, bucket: Bucket) -> bool:
        """The parameters are replicated, but every rank updated its own part only."""
        updated = sum(piece.stop - piece.start for piece in bucket.pieces)
        return not bucket.traits.shards_parameters and updated < bucket.size

    def _fetch_ahead(self, buckets: list[Bucket]) -> Iterator[_Fetched]:
        """Pieces in order, each fetched while the one before is updated, more of them where the store has room."""
        todo = deque((bucket, piece) for bucket in buckets for piece in bucket.pieces)
        fetched: deque[_Fetched] = deque()
        while todo or fetched:
            while todo and len(fetched) < (MOST_FETCHED if self._has_room(todo[0][1]) else 2):
                bucket, piece = todo.popleft()
                fetched.append(self._fetch(bucket, piece=piece))
            yield fetched.popleft()

    def _has_room(self, piece: Piece) -> bool:
        return piece in self._ahead or self._stores.optimizer.has_room(piece.states)

    def _fetch(self, bucket: Bucket, *, piece: Piece) -> _Fetched:
        gradient = None if piece.gradient is None else self._stores.gradients.fetch(piece.gradient)
        states = self._ahead.pop(piece, None) or self._stores.optimizer.fetch(piece.states)
        return _Fetched(bucket=bucket, piece=piece, states=states, gradient=gradient)

    def _update(self, fetched: _Fetched, *, control: Tensor, clock: PhaseClock) -> _Away:
        bucket, piece = fetched.bucket, fetched.piece
        with clock.phase("io"):
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
        return states[0], moments, self._passing.acquire(piece.stop - piece.start, dtype=bucket.traits.dtype)

    def _resident_parameter(self, bucket: Bucket, *, piece: Piece) -> Tensor | None:
        """The parameter's own memory, if it can be written in place."""
        if not bucket.traits.shards_parameters:
            return piece.of(bucket.full)
        if self._stores.parameters.tier is Tier.nvme:
            return None
        return self._stores.parameters.fetch(piece.parameter).wait()

    def _put(self, bucket: Bucket, *, piece: Piece, states: Tensor, out: Tensor | None) -> _Away:
        puts = [self._stores.optimizer.put(piece.states, value=states)]
        if piece.gradient is not None:
            self._stores.gradients.forget(piece.gradient)
        if out is not None and bucket.traits.shards_parameters:
            puts.append(self._stores.parameters.put(piece.parameter, value=out))
        elif out is not None and out.device != bucket.full.device:
            piece.of(bucket.full).copy_(out)
        return _Away(puts=tuple(puts), borrowed=out if self._passing.lends(out) else None)

    def _wait(self, away: _Away, *, clock: PhaseClock) -> None:
        with clock.phase("io"):
            for put in away.puts:
                put.wait()
        if away.borrowed is not None:
            self._passing.release(away.borrowed)
