"""Where the parameters of one bucket are, and why they are there. Buffers have the bucket's dtype."""

import threading
from collections.abc import Container
from concurrent.futures import Future
from contextlib import nullcontext
from enum import Enum

import torch
from torch import Tensor, nn

from ztk.core.runtime import Tier
from ztk.core.runtime.buffers import BufferPool, references
from ztk.core.runtime.clock import PhaseClock
from ztk.core.runtime.pending import Handle, Pending
from ztk.core.runtime.planned import place_of
from ztk.core.runtime.store import Store
from ztk.core.runtime.streams import Stream, order_behind_current, stream_of
from ztk.zero.buckets.exchange import Exchange
from ztk.zero.buckets.layout import BucketLayout, Placement
from ztk.zero.buckets.piece import Piece
from ztk.zero.buckets.units import BucketTraits
from ztk.zero.parameters.awaited import arrived, await_value
from ztk.zero.parameters.bits import same_bits
from ztk.zero.parameters.released import is_released, placeholder, release, restore


class ParameterState(Enum):
    """Where a bucket's parameters are, and what memory they take."""

    sharded = "sharded"  # only the rank's shard exists; the parameters are placeholders without memory
    gathering = "gathering"  # the full buffer is allocated and being filled; the parameters are still placeholders
    gathered = "gathered"  # the parameters are views of the full buffer


class Residency:
    """The parameter half of a bucket: the full buffer while there is one, and what keeps it.

    full: [layout.size], the parameters; None while they are sharded. Reading it waits for what `expect` was told of.
    updated: done when an optimizer that runs behind the forward has finished with the bucket; None: no such optimizer runs.
    open_units: running forwards of units that use the bucket. pins: contexts that keep it gathered across passes.
    is_used: it was used since it was gathered, or since it was kept for reuse. stays: once gathered, it stays until the end of a batch.
    lost: parameters that were written while they were gathered, since somebody asked.
    has_returned_view: a unit returned a view of it, so it stays until the model's forward ends.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        *,
        traits: BucketTraits,
        layout: BucketLayout,
        pieces: list[Piece],
        exchange: Exchange,
        store: Store,
        pool: BufferPool,
    ) -> None:
        self.state = ParameterState.sharded
        self._full: Tensor | None = None
        self._expected: Pending | None = None  # the gather of updated parameters that nobody has waited for
        self._computing: Stream | None = None  # the stream that computed when it began
        self._clock: tuple[PhaseClock, int] | None = None  # on which the thread of this number waits for it
        self._waiting = threading.RLock()
        self.updated: Future | None = None
        self.open_units = self.pins = 0
        self.is_used = self.stays = self.has_returned_view = False
        self._was_gathered_by_pin = False
        self.lost: list[str] = []
        self._parameters, self._traits, self._layout, self._pieces = parameters, traits, layout, pieces
        self._exchange, self._store, self._pool = exchange, store, pool
        self._work: Pending | None = None  # the gather that is under way
        self._placeholder: Tensor | None = None
        self._versions: list[int] = []  # of the parameters when they were shown

    @property
    def full(self) -> Tensor | None:
        """See the class."""
        if self._expected is not None:
            self.wait_for_values()
        return self._full

    @full.setter
    def full(self, value: Tensor | None) -> None:
        self._full = value

    # Values on their way

    @property
    def is_viewed(self) -> bool:
        """A script has a view of a parameter, as `p.data` or `p.detach()` from before the step: nobody sees when that is read."""
        own = len(self._parameters) + 2  # the parameters, `full`, and the Python object that is asked
        return self._full is not None and references(self._full) > own

    def expect(self, gather: Pending, *, clock: PhaseClock) -> None:
        """The full buffer of a bucket that is never sharded is complete when `gather` is: whoever uses it, or a parameter, waits.

        clock: of this thread, where its waiting counts as communication.
        """
        assert self._full is not None
        self._expected, self._computing = gather, stream_of(self._full)
        self._clock = clock, threading.get_ident()
        for parameter in self._parameters:
            await_value(parameter, wait=self.wait_for_values)

    def wait_for_values(self) -> None:
        """Returns when what `expect` was told of is there: on a GPU for the current stream, and for the one that computed then. Raises what
        went wrong in it."""
        with self._waiting, torch._C.DisableTorchFunctionSubclass():
            if self._expected is None:
                return
            clock, thread = self._clock or (None, 0)
            is_timed = clock is not None and thread == threading.get_ident()
            try:
                with clock.phase("communication") if is_timed else nullcontext():
                    self._expected.wait()
                if self._computing is not None and self._full is not None:
                    order_behind_current(self._computing, tensor=self._full)
            finally:  # only now: another thread that asks waits, too
                self._expected = None
                for parameter in self._parameters:
                    arrived(parameter)

    # sharded -> gathering -> gathered -> sharded

    @torch.inference_mode(False)
    def start_gather(self) -> None:
        """sharded -> gathering: fetches the rank's shard into the full buffer, then gathers all shards in place."""
        if self.state is not ParameterState.sharded:
            return
        self.full = self._pool.acquire(self._layout.size, dtype=self._traits.dtype)
        self._work = self._exchange.gather(self.full, label=self._traits.name, fetch=self.start_fetch)
        self.state = ParameterState.gathering

    def finish_gather(self) -> None:
        """-> gathered: the parameters are usable."""
        if self.state is ParameterState.gathered:
            return
        self.start_gather()
        self._finish_work()
        self.show_parameters()
        self.state = ParameterState.gathered

    @torch.inference_mode(False)
    def release(self, *, may_be_viewed: bool = True) -> None:
        """-> sharded: the parameters keep their shapes and read as NaN; the full buffer returns to the pool.

        may_be_viewed: it returns as soon as no view of a parameter is left. In a backward, autograd keeps one for a moment, of a node that has
        run.
        """
        if self.state is ParameterState.sharded:
            return
        if self.state is ParameterState.gathering:
            self._finish_work()
        else:
            self._note_lost_writes()
        if self._placeholder is None:
            assert self.full is not None
            self._placeholder = placeholder((), dtype=self._traits.dtype, device=self.full.device)
        for parameter, placement in zip(self._parameters, self._layout.placements, strict=True):
            release(parameter, value=self._placeholder.expand(placement.shape))
        self._pool.release(self.full, may_be_viewed=may_be_viewed, is_changing=self._traits.trainable)
        self.full, self.is_used, self.state = None, False, ParameterState.sharded

    def keep_full(self, full: Tensor) -> None:
        """-> gathered for good: the parameters become views of `full` [layout.size] and are never sharded."""
        self.full, self.state = full, ParameterState.gathered
        self.show_parameters()

    @torch.inference_mode(False)
    def show_parameters(self) -> None:
        """Makes the parameters views of `full`."""
        for parameter, placement in zip(self._parameters, self._layout.placements, strict=True):
            restore(parameter, value=self.full[placement.offset : placement.stop].view(placement.shape))
        self.accept_writes()

    def accept_writes(self) -> None:
        """What was written into the parameters until now is known, or stored."""
        self._versions = [parameter._version for parameter in self._parameters]

    @property
    def is_shown(self) -> bool:
        """The parameters are views of `full`, unless a script gave them other memory."""
        return self._full is not None and not is_released(self._parameters[0])

    def check_fits(self, value: Tensor, *, placement: Placement) -> None:
        """Raises ValueError if the parameter of `placement`, whose values are `value` now, of any shape, cannot have its place back."""
        if value.dtype != self._traits.dtype or value.shape != torch.Size(placement.shape):
            raise ValueError(
                f"parameter {placement.name}: is {value.dtype} of shape {tuple(value.shape)} now, and the engine holds it as "
                f"{self._traits.dtype} of shape {tuple(placement.shape)}: convert the model before initialize"
            )

    def bring_back(self, names: Container[str]) -> None:
        """Sharded parameters that a script gave other memory (p.data = x) get their places in `full` back, with the new values.

        Raises ValueError for one of another dtype or shape.
        """
        start = self._start_of_full()
        for parameter, placement in zip(self._parameters, self._layout.placements, strict=True):
            if placement.name in names and self._is_moved(parameter, placement=placement, start=start):
                # pyrefly: ignore[missing-attribute]  # a descriptor of the class at run time
                value = torch.Tensor.data.__get__(parameter)
                self.check_fits(value, placement=placement)
                # pyrefly: ignore[unsupported-operation]  # it is gathered
                own = self.full[placement.offset : placement.stop].view(placement.shape)
                restore(parameter, value=own.copy_(value))

    def _start_of_full(self) -> tuple[int, int]:
        """`place_of` the full buffer."""
        assert self.full is not None
        return place_of(self.full)

    def _is_moved(self, parameter: nn.Parameter, *, placement: Placement, start: tuple[int, int]) -> bool:
        """The parameter has other memory than its place in the full buffer, which begins at `start`."""
        storage, first = start
        own = storage, first + placement.offset * self._traits.dtype.itemsize
        return place_of(parameter) != own and placement.numel > 0

    def _note_lost_writes(self) -> None:
        """Adds to `lost` the sharded parameters that were written since they were shown: in place, or by other memory."""
        start = self._start_of_full()
        for parameter, placement, version in zip(
            self._parameters, self._layout.placements, self._versions, strict=True
        ):
            if is_released(parameter):  # somebody else has taken it over
                continue
            if parameter._version != version or self._is_moved(parameter, placement=placement, start=start):
                self.lost.append(placement.name)

    def start_fetch(self) -> Handle:
        """Brings the rank's shard into `full`: from now on, or as soon as the optimizer has finished with it."""
        # Each rank sees the end of its update at another time, but all must start the collective alike. So this looks at whether there is
        # an update, not at whether it is done.
        # What comes from the disk is there when the host has waited; what comes from main memory, in the order of a stream.
        is_immediate = self._store.tier is not Tier.nvme and self.updated is None
        fetches = self._fetch_shard() if self.updated is None or self.updated.done() else None

        def finish() -> None:
            for fetch in self._fetch_shard() if fetches is None else fetches:
                fetch.wait()

        copy = fetches[-1].copy if is_immediate and fetches else None  # all of them run on one stream, in this order
        return Handle(finish=finish, is_immediate=is_immediate, copy=copy)

    def _fetch_shard(self) -> list[Handle]:
        self.wait_for_update()
        return [self._store.fetch_into(piece.parameter, out=piece.of(self.full)) for piece in self._pieces]

    def _finish_work(self) -> None:
        assert self._work is not None
        self._work.wait()
        self._work = None

    def wait_for_update(self) -> None:
        """Returns when an optimizer that runs behind the forward has finished with this bucket. Raises what went wrong in it."""
        if (updated := self.updated) is not None:
            updated.result()
            self.updated = None

    @torch.inference_mode(False)
    def is_changed(self, elements: range) -> bool:
        """The full buffer has other bits than the stored shard, in those of `elements` (of the bucket) that this rank stores.

        False where the buffer holds what quantized collectives made of the shards.
        """
        if not self._traits.shards_parameters or self.full is None or not self._exchange.is_exact:
            return False
        self.wait_for_update()
        for piece in self._pieces:
            start, stop = max(piece.start, elements.start), min(piece.stop, elements.stop)
            if start < stop:
                stored = torch.empty(piece.numel, dtype=self._traits.dtype, device=self.full.device)
                self._store.fetch_into(piece.parameter, out=stored).wait()
                if not same_bits(stored[start - piece.start : stop - piece.start], second=self.full[start:stop]):
                    return True
        return False

    # What keeps it gathered

    @property
    def is_kept(self) -> bool:
        """It stays gathered across passes."""
        return self.pins > 0 or self.stays

    @property
    def is_needed(self) -> bool:
        """The forward that is running needs it."""
        return self.open_units > 0 or self.has_returned_view

    def pin(self, *, gathered_by_pin: bool) -> None:
        """One more context keeps it. gathered_by_pin: it was not in use before that context came."""
        self._was_gathered_by_pin |= gathered_by_pin
        self.pins += 1

    def unpin(self) -> bool:
        """One context less. Returns whether no context is left and the first one had gathered it."""
        self.pins -= 1
        if self.pins or not self._was_gathered_by_pin:
            return False
        self._was_gathered_by_pin = False
        return True
