"""The host tier: shards are stored in main memory, page-locked if there is a GPU."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.core.policies.offload import OffloadPolicy
from ztk.core.runtime.memory import MemoryLedger, Tier
from ztk.core.runtime.pending import Handle
from ztk.core.runtime.planned import place_of
from ztk.core.runtime.streams import Copy, start_copy
from ztk.zero.offload.pool import AlignedRegion
from ztk.zero.offload.slot import StoredSlot, check_fits

# [Note: Streams and host memory]
# Copies between host and device run on streams of their own (`ztk.core.runtime.streams`), so they overlap with computation. `last_copy` is
# the newest copy of a slot: the CPU may read or change the slot's memory only after it, and the next copy of the slot starts after it.
# Without it an update on the CPU could overwrite values that are still being copied to the device.


@dataclass(slots=True, eq=False, kw_only=True)
class HostSlot(StoredSlot):
    """A tensor in main memory."""

    tensor: Tensor
    region: AlignedRegion
    last_copy: Copy | None = None  # See [Note: Streams and host memory]


class HostStore:
    """Store (see `ztk.core.runtime.store`) in main memory: `fetch` returns the tensor itself, and `put` of that tensor is free.

    Between host tensors all work is done when the call returns. Memory is page-aligned and booked in the ledger with
    the slots' own bytes; pages become resident at the first write.
    """

    tier = Tier.host

    def __init__(self, policy: OffloadPolicy, *, ledger: MemoryLedger) -> None:
        self._pin = policy.pin_memory and torch.cuda.is_initialized()
        self._ledger = ledger
        self._slots: list[HostSlot] = []

    def allocate(
        self, *, name: str, shape: tuple[int, ...], dtype: torch.dtype, category: str, keep: bool = False
    ) -> HostSlot:
        """A zero-filled slot. keep: has no effect, because slots are always in memory."""
        region = self._region(math.prod(shape) * dtype.itemsize)
        tensor = region.bytes.view(dtype).view(shape)
        slot = HostSlot(name=name, shape=tuple(shape), dtype=dtype, category=category, tensor=tensor, region=region)
        self._slots.append(slot)
        self._ledger.add(tier=self.tier, category=category, nbytes=slot.nbytes)
        return slot

    def _region(self, nbytes: int) -> AlignedRegion:
        return AlignedRegion(nbytes=nbytes, pin=self._pin)

    def fetch(self, slot: HostSlot) -> Handle:
        """The slot's tensor, which the CPU may read and change once `wait()` has returned."""
        return Handle(slot.tensor, finish=None if slot.last_copy is None else slot.last_copy.synchronize)

    def has_room(self, slot: HostSlot) -> bool:
        """Always True: every slot is in memory."""
        return True

    def fetch_ahead(self, slot: HostSlot) -> None:
        """Always returns None, because prefetching gains nothing."""
        return None

    def fetch_into(self, slot: HostSlot, *, out: Tensor) -> Handle:
        """Copies the slot into `out` (contiguous, of its dtype). On a GPU the current stream may use it after `wait()`.

        Raises ValueError if `out` does not fit.
        """
        check_fits(out, slot=slot, argument="out")
        return _handle(out, copy=_copy(slot, source=slot.tensor, out=out.view(slot.shape)))

    def put(self, slot: HostSlot, *, value: Tensor) -> Handle:
        """Sets the slot's content to `value`. On a GPU the current stream may change `value` after `wait()`.

        Raises ValueError if `value` does not fit.
        """
        check_fits(value, slot=slot, argument="value")
        if place_of(value) == place_of(slot.tensor):
            return Handle(value)
        return _handle(value, copy=_copy(slot, source=value.detach().view(slot.shape), out=slot.tensor))

    def release(self, slot: HostSlot) -> None:
        """Does nothing: fetched memory is the slot itself."""

    def forget(self, slot: HostSlot) -> None:
        """Does nothing: the slot keeps its memory."""

    def flush(self) -> None:
        """Waits for copies from the device."""
        for slot in self._slots:
            _finish_copy(slot)

    def close(self) -> None:
        """Frees the memory, except for tensors that are still referenced. Idempotent."""
        self.flush()
        for slot in self._slots:
            slot.region.close()
            self._ledger.remove(tier=self.tier, category=slot.category, nbytes=slot.nbytes)
        self._slots.clear()


def _copy(slot: HostSlot, *, source: Tensor, out: Tensor) -> Copy | None:
    """Copies after the slot's earlier copies. Returns None if both are in host memory and the copy is done."""
    copy = start_copy(source, out=out, after=slot.last_copy)
    if copy is None:
        _finish_copy(slot)
        out.copy_(source)
        return None
    slot.last_copy = copy
    return copy


def _handle(value: Tensor, *, copy: Copy | None) -> Handle:
    """A handle of `value` that makes the current stream wait for `copy`, if there is one."""
    return Handle(value, finish=None if copy is None else copy.wait)


def _finish_copy(slot: HostSlot) -> None:
    """Waits until the host may use the slot's memory."""
    if slot.last_copy is not None:
        slot.last_copy.synchronize()
