"""The host tier: shards sleep in main memory, page-locked beside a GPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.offload.policy import OffloadPolicy
from ztk.offload.pool import AlignedRegion
from ztk.offload.slot import SlotSpec, check_fits
from ztk.runtime.memory import MemoryLedger, Tier

# [Note: Streams and host memory]
# Copies between host and device run on the caller's current stream, so they overlap with computation if the caller
# chooses a side stream. `last_copy` marks the end of the newest copy that touches a slot: the CPU may look at or change
# the slot's memory only after it, and a copy on another stream starts after it. Without it an update on the CPU could
# overwrite values that are still on their way to the device.


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
        """A zero-filled slot. keep: it is in memory anyway."""
        spec = SlotSpec(name=name, shape=tuple(shape), dtype=dtype, category=category)
        region = AlignedRegion(nbytes=spec.nbytes, pin=self._pin)
        tensor = region.bytes.view(dtype).view(spec.shape)
        slot = HostSlot(
            name=name, shape=spec.shape, dtype=dtype, category=category, spec=spec, tensor=tensor, region=region
        )
        self._slots.append(slot)
        self._ledger.add(tier=self.tier, category=category, nbytes=spec.nbytes)
        return slot

    def fetch(self, slot: HostSlot) -> "_Pending":
        """The slot's own tensor, free for the CPU to read and change once `wait()` returns."""
        return _Pending(value=slot.tensor, copy=slot.last_copy)

    def has_room(self, slot: HostSlot) -> bool:
        """Every slot is in memory."""
        return True

    def fetch_ahead(self, slot: HostSlot) -> None:
        """There is nothing to gain."""
        return None

    def fetch_into(self, slot: HostSlot, *, out: Tensor) -> "_Pending":
        """Copy the slot into `out`. On CUDA the copy is in the order of the current stream; `wait()` waits for it."""
        check_fits(out, spec=slot.spec, argument="out")
        return _Pending(value=out, copy=_copy(slot, source=slot.tensor, out=out.view(slot.shape)))

    def put(self, slot: HostSlot, *, value: Tensor) -> "_Pending":
        """Make `value` the slot's content; a CUDA value must stay unchanged on other streams until `wait()` returns."""
        check_fits(value, spec=slot.spec, argument="value")
        if value.data_ptr() == slot.tensor.data_ptr():
            return _Pending(value=value, copy=None)
        return _Pending(value=value, copy=_copy(slot, source=value.detach().view(slot.shape), out=slot.tensor))

    def release(self, slot: HostSlot) -> None:
        """Nothing to do: fetched memory is the slot itself."""

    def forget(self, slot: HostSlot) -> None:
        """Nothing to do: memory is the slot's for good."""

    def flush(self) -> None:
        """Wait for copies from the device."""
        for slot in self._slots:
            _finish_copy(slot.last_copy)

    def close(self) -> None:
        """Give the memory back (a tensor that is still referenced keeps its own). May be called again."""
        self.flush()
        for slot in self._slots:
            slot.region.close()
            self._ledger.remove(tier=self.tier, category=slot.category, nbytes=slot.spec.nbytes)
        self._slots.clear()


class _Pending:
    """A copy between host and device, or nothing at all."""

    def __init__(self, *, value: Tensor, copy: torch.cuda.Event | None) -> None:
        self._value, self._copy = value, copy

    def wait(self) -> Tensor:
        """Block the CPU until the copy is done; the fetched tensor, `out` or `value`."""
        _finish_copy(self._copy)
        return self._value


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


def _finish_copy(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()
