"""State of the parameters of one bucket, and the reasons to keep them gathered. Buffers have the bucket's dtype."""

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
from ztk.core.runtime.streams import Stream, has_streams, order_behind_current, stream_of
from ztk.zero.buckets.exchange import Exchange
from ztk.zero.buckets.layout import BucketLayout, Placement
from ztk.zero.buckets.piece import Piece
from ztk.zero.buckets.units import BucketTraits
from ztk.zero.parameters.awaited import arrived, await_value
from ztk.zero.parameters.bits import same_bits
from ztk.zero.parameters.released import is_released, placeholder, release, restore


class ParameterState(Enum):
    """Whether a bucket's parameters are gathered, and the memory they take."""

    sharded = "sharded"  # only the rank's shard exists; the parameters are placeholders without memory
    gathering = "gathering"  # the full buffer is allocated and being filled; the parameters are still placeholders
    gathered = "gathered"  # the parameters are views of the full buffer


class Residency:
    """The parameter half of a bucket: the full buffer while it exists, and the uses that keep it.

    full: [layout.size], the parameters. None while they are sharded. Reading it waits for the pending gather (`expect`).
    updated: future of the bucket's update, if the optimizer runs during the forward, else None.
    open_units: running forwards of units that use the bucket. pins: contexts that keep it gathered across passes.
    is_used: whether it was used since it was gathered, or since it was kept for reuse. stays: once gathered, it stays until the end of a
    batch.
    lost: parameters that were written while they were gathered, since the last check.
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
        self._expected: Pending | None = None  # the pending gather of updated parameters
        self._computing: Stream | None = None  # the compute stream when it began
        self._clock: tuple[PhaseClock, int] | None = None  # clock for waits of the thread with this number
        self._waiting = threading.RLock()
        self.updated: Future | None = None
        self.open_units = self.pins = 0
        self.is_used = self.stays = self.has_returned_view = self._is_rounded = False
        self._was_gathered_by_pin = False
        self.lost: list[str] = []
        self._parameters, self._traits, self._layout, self._pieces = parameters, traits, layout, pieces
        self._exchange, self._store, self._pool = exchange, store, pool
        self._work: Pending | None = None  # the running gather
        self._placeholder: Tensor | None = None
        self._versions: list[int] = []  # of the parameters at `show_parameters`

    @property
    def full(self) -> Tensor | None:
        """The full buffer, or None. Waits for the pending gather."""
        if self._expected is not None:
            self.wait_for_values()
        return self._full

    @full.setter
    def full(self, value: Tensor | None) -> None:
        self._full = value

    # Pending values

    @property
    def is_viewed(self) -> bool:
        """Whether a script holds a view of a parameter, such as `p.data` or `p.detach()` from before the step. Reads of a view go
        undetected."""
        own = len(self._parameters) + 2  # the parameters, `full`, and the storage's Python object
        return self._full is not None and references(self._full) > own

    def expect(self, gather: Pending, *, clock: PhaseClock) -> None:
        """Sets the pending gather of a bucket that is never sharded. Any use of the full buffer or a parameter waits for it.

        clock: this thread's; its waits count as communication.
        """
        assert self._full is not None
        self._expected, self._computing = gather, stream_of(self._full)
        self._clock = clock, threading.get_ident()
        for parameter in self._parameters:
            await_value(parameter, wait=self.wait_for_values)

    def wait_for_values(self) -> None:
        """Waits for the pending gather: the current stream on a GPU, and the stream that computed when it was set. Raises the error of the
        gather."""
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
            finally:  # cleared last, so that other threads wait, too
                self._expected = None
                for parameter in self._parameters:
                    arrived(parameter)

    # sharded -> gathering -> gathered -> sharded

    @torch.inference_mode(False)
    def start_gather(self, *, is_exact: bool = False) -> None:
        """sharded -> gathering: fetches the rank's shard into the full buffer, then gathers all shards in place.

        is_exact: see `Exchange.gather`.
        """
        if self.state is not ParameterState.sharded:
            return
        self._is_rounded = self._exchange.rounds(is_exact=is_exact)
        self.full = self._pool.acquire(self._layout.size, dtype=self._traits.dtype)
        self._work = self._exchange.gather(
            self.full, label=self._traits.name, fetch=self.start_fetch, is_exact=is_exact
        )
        self.state = ParameterState.gathering

    def finish_gather(self) -> None:
        """-> gathered: makes the parameters usable."""
        if self.state is ParameterState.gathered:
            return
        self.start_gather()
        self._finish_work()
        self.show_parameters()
        self.state = ParameterState.gathered

    @torch.inference_mode(False)
    def release(self, *, may_be_viewed: bool = True) -> None:
        """-> sharded: the parameters keep their shapes and read as NaN; the full buffer returns to the pool.

        may_be_viewed: the buffer returns as soon as no view of a parameter is left. In a backward, autograd briefly keeps a view for a node
        that has run.
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
        """Marks all writes into the parameters so far as handled."""
        self._versions = [parameter._version for parameter in self._parameters]

    @property
    def is_shown(self) -> bool:
        """Whether the parameters are views of `full`. False if a script has replaced their memory."""
        return self._full is not None and not is_released(self._parameters[0])

    def check_fits(self, value: Tensor, *, placement: Placement) -> None:
        """Raises ValueError if `value` (any shape), the current value of the parameter of `placement`, does not fit into its place."""
        if value.dtype != self._traits.dtype or value.shape != torch.Size(placement.shape):
            raise ValueError(
                f"parameter {placement.name}: is {value.dtype} of shape {tuple(value.shape)} now, and the engine holds it as "
                f"{self._traits.dtype} of shape {tuple(placement.shape)}: convert the model before initialize"
            )

    def bring_back(self, names: Container[str]) -> None:
        """Moves sharded parameters with other memory (p.data = x in a script) back to their places in `full`, with the new values.

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
        """Whether the parameter has other memory than its place in the full buffer, which begins at `start`."""
        storage, first = start
        own = storage, first + placement.offset * self._traits.dtype.itemsize
        return place_of(parameter) != own and placement.numel > 0

    def _note_lost_writes(self) -> None:
        """Adds sharded parameters that were written since they were shown to `lost`: written in place, or given other memory."""
        start = self._start_of_full()
        for parameter, placement, version in zip(
            self._parameters, self._layout.placements, self._versions, strict=True
        ):
            if is_released(parameter):  # another engine has taken it over
                continue
            if parameter._version != version or self._is_moved(parameter, placement=placement, start=start):
                self.lost.append(placement.name)

    def start_fetch(self) -> Handle:
        """Loads the rank's shard into `full`, at once or as soon as the optimizer has finished with it."""
        # Ranks finish their updates at different times, but must all start the collective alike. So this checks whether there is
        # an update, not whether it is done.
        # Data from the disk is present after the host has waited; data from main memory arrives in stream order.
        is_on_disk = self._store.tier is Tier.nvme
        is_immediate = not is_on_disk and self.updated is None
        # Copies between memories of a GPU's machine belong to the stream of the collective, so that computing does not wait for them.
        assert self.full is not None
        is_early = (is_on_disk or not has_streams(self.full)) and (self.updated is None or self.updated.done())
        fetches = self._fetch_shard() if is_early else None

        def finish() -> None:
            for fetch in self._fetch_shard() if fetches is None else fetches:
                fetch.wait()

        return Handle(finish=finish, is_immediate=is_immediate)

    def _fetch_shard(self) -> list[Handle]:
        self.wait_for_update()
        return [self._store.fetch_into(piece.parameter, out=piece.of(self.full)) for piece in self._pieces]

    def _finish_work(self) -> None:
        assert self._work is not None
        self._work.wait()
        self._work = None

    def wait_for_update(self) -> None:
        """Waits until the optimizer that runs during the forward has finished with this bucket. Raises its error."""
        if (updated := self.updated) is not None:
            updated.result()
            self.updated = None

    @torch.inference_mode(False)
    def is_changed(self, elements: range) -> bool:
        """Whether the full buffer differs from the stored shard, in the part of `elements` (of the bucket) that this rank stores.

        False if the buffer holds values from quantized collectives.
        """
        if not self._traits.shards_parameters or self.full is None or self._is_rounded:
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

    # Reasons to stay gathered

    @property
    def is_kept(self) -> bool:
        """Whether it stays gathered across passes."""
        return self.pins > 0 or self.stays

    @property
    def is_needed(self) -> bool:
        """Whether the running forward needs it."""
        return self.open_units > 0 or self.has_returned_view

    def pin(self, *, gathered_by_pin: bool) -> None:
        """Adds a context that keeps it gathered. gathered_by_pin: it was not in use before that context."""
        self._was_gathered_by_pin |= gathered_by_pin
        self.pins += 1

    def unpin(self) -> bool:
        """Removes a context. Returns whether no context is left and the first one had gathered it."""
        self.pins -= 1
        if self.pins or not self._was_gathered_by_pin:
            return False
        self._was_gathered_by_pin = False
        return True
