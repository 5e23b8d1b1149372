"""The host tier: shards are stored in main memory, page-locked beside a GPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.offload.pool import AlignedRegion
from ztk.offload.slot import SlotSpec, check_fits
from ztk.policies.offload import OffloadPolicy
from ztk.runtime.memory import MemoryLedger, Tier
from ztk.runtime.pending import Handle
from ztk.runtime.planned import place_of

# [Note: Streams and host memory]
# Copies between host and device run on the caller's current stream, so they overlap with computation if the caller
# chooses a side stream. `last_copy` marks the end of the newest copy of a slot: the CPU may read or change the slot's
# memory only after it, and a copy on another stream starts after it. Without it an update on the CPU could overwrite
# values that are still being copied to the device.


@dataclass(slots=True, eq=False, kw_only=True)
class HostSlot:
    """A tensor in main memory."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    category: str
    spec: SlotSpec
    tensor: Tensor
    region: AlignedRegion
    last_copy: torch.cuda.Event | None = None  # See [Note: Streams and host memory]


class HostStore:
    """Store (see `ztk.zero.store`) in main memory: `fetch` returns the tensor itself, `put` of that tensor is free.

    Between host tensors everything is done when the call returns. Memory is page-aligned and booked in the ledger as
    the slots' own bytes; pages become resident at the first write.
    """

    tier = Tier.host

    def __init__(self, policy: OffloadPolicy, *, ledger: MemoryLedger) -> None:
        self._pin = policy.pin_memory and torch.cuda.is_available()
        self._ledger = ledger
        self._slots: list[HostSlot] = []

    def allocate(
        self, *, name: str, shape: tuple[int, ...], dtype: torch.dtype, category: str, keep: bool = False
    ) -> HostSlot:
        """A zero-filled slot. keep: has no effect, the slot is in memory anyway."""
        spec = SlotSpec(name=name, shape=tuple(shape), dtype=dtype, category=category)
        region = self._region(spec.nbytes)
        tensor = region.bytes.view(dtype).view(spec.shape)
        slot = HostSlot(
            name=name, shape=spec.shape, dtype=dtype, category=category, spec=spec, tensor=tensor, region=region
        )
        self._slots.append(slot)
        self._ledger.add(tier=self.tier, category=category, nbytes=spec.nbytes)
        return slot

    def _region(self, nbytes: int) -> AlignedRegion:
        return AlignedRegion(nbytes=nbytes, pin=self._pin)

    def fetch(self, slot: HostSlot) -> Handle:
        """The slot's tensor, which the CPU may read and change once `wait()` has returned."""
        return _handle(slot.tensor, copy=slot.last_copy)

    def has_room(self, slot: HostSlot) -> bool:
        """Every slot is in memory."""
        return True

    def fetch_ahead(self, slot: HostSlot) -> None:
        """None: reading ahead gains nothing."""
        return None

    def fetch_into(self, slot: HostSlot, *, out: Tensor) -> Handle:
        """Copies the slot into `out` (contiguous, of its dtype), in the order of the current stream.

        Raises ValueError if `out` does not fit.
        """
        check_fits(out, spec=slot.spec, argument="out")
        return _handle(out, copy=_copy(slot, source=slot.tensor, out=out.view(slot.shape)))

    def put(self, slot: HostSlot, *, value: Tensor) -> Handle:
        """Makes `value` the slot's content. A CUDA value must not change on other streams until `wait()` has returned.

        Raises ValueError if `value` does not fit.
        """
        check_fits(value, spec=slot.spec, argument="value")
        if place_of(value) == place_of(slot.tensor):
            return Handle(value)
        return _handle(value, copy=_copy(slot, source=value.detach().view(slot.shape), out=slot.tensor))

    def release(self, slot: HostSlot) -> None:
        """Nothing to do: fetched memory is the slot itself."""

    def forget(self, slot: HostSlot) -> None:
        """Nothing to do: the slot keeps its memory."""

    def flush(self) -> None:
        """Waits for copies from the device."""
        for slot in self._slots:
            _finish_copy(slot.last_copy)

    def close(self) -> None:
        """Frees the memory, but for tensors that are still referenced. Idempotent."""
        self.flush()
        for slot in self._slots:
            slot.region.close()
            self._ledger.remove(tier=self.tier, category=slot.category, nbytes=slot.spec.nbytes)
        self._slots.clear()


def _copy(slot: HostSlot, *, source: Tensor, out: Tensor) -> torch.cuda.Event | None:
    """Copy in the order of the current stream, behind earlier copies of this slot; the event that ends it, if any."""
    if not (source.is_cuda or out.is_cuda):
        _finish_copy(slot.last_copy)
        out.copy_(source)
        return None
    device = source.device if source.is_cuda else out.device
    stream = torch.cuda.current_stream(device)
    if slot.last_copy is not None:
        stream.wait_event(slot.last_copy)
    out.copy_(source, non_blocking=True)
    slot.last_copy = torch.cuda.Event()
    slot.last_copy.record(stream)
    return slot.last_copy


def _handle(value: Tensor, *, copy: torch.cuda.Event | None) -> Handle:
    """`value`, once the copy has ended; None: there is none."""
    return Handle(value, finish=None if copy is None else copy.synchronize)


def _finish_copy(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()
