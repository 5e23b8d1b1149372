"""The `Store` protocol of a memory tier, and its implementation for device memory. `ztk.zero.offload` has main memory and disks."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ztk.core.runtime.memory import MemoryLedger, Tier
from ztk.core.runtime.pending import Handle, Pending
from ztk.core.runtime.streams import Copy, has_streams, start_copy


class Slot(Protocol):
    """A stored tensor's name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Store(Protocol):
    """Keeps tensors in one tier.

    A fetched tensor's memory is valid until `put` or `release` of its slot. Puts and fetches of one slot happen in the order of the
    calls. `wait()` or `flush()` raises the errors of the medium. `out` and `value` are contiguous, with the slot's dtype and number of
    elements, in any shape.
    """

    tier: Tier

    def allocate(
        self, *, name: str, shape: tuple[int, ...], dtype: torch.dtype, category: str, keep: bool = False
    ) -> Slot: ...  # keep: values stay in memory until `forget`, if there is room

    def fetch(self, slot: Slot) -> Pending: ...

    def has_room(self, slot: Slot) -> bool: ...  # whether prefetching it leaves enough memory

    def fetch_ahead(self, slot: Slot) -> Pending | None: ...  # early prefetch; None if there is no memory or no gain

    def fetch_into(self, slot: Slot, *, out: Tensor) -> Handle: ...

    def put(self, slot: Slot, *, value: Tensor) -> Pending: ...

    def release(self, slot: Slot) -> None: ...

    def forget(self, slot: Slot) -> None: ...  # drops the value; undefined until the next `put`

    def flush(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Stores:
    """Store of each kind of state. average: store of averaged weights, or None if they are optimizer states or do not exist."""

    optimizer: Store
    gradients: Store
    parameters: Store
    average: Store | None = None

    @property
    def updates_on_host(self) -> bool:
        """Whether the optimizer runs in main memory, because its states are there or on a disk."""
        return self.optimizer.tier is not Tier.device

    def close(self) -> None:
        """Flushes and closes every store, also when one of them raises."""
        with ExitStack() as stack:
            stores = (self.optimizer, self.gradients, self.parameters, self.average)
            for store in {id(store): store for store in stores if store is not None}.values():
                stack.callback(store.close)
                stack.callback(store.flush)


@dataclass(kw_only=True, slots=True, eq=False)
class DeviceSlot:
    """A slot that holds the tensor itself. last_copy: the last copy from host memory, or None if the value came from the device."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: Tensor
    last_copy: Copy | None = None


class DeviceStore:
    """No offloading: tensors stay in the memory the model computes in."""

    tier = Tier.device

    def __init__(self, *, device: torch.device, ledger: MemoryLedger) -> None:
        self._device = device
        self._ledger = ledger

    def allocate(
        self, *, name: str, shape: tuple[int, ...], dtype: torch.dtype, category: str, keep: bool = False
    ) -> DeviceSlot:
        tensor = torch.zeros(shape, dtype=dtype, device=self._device)
        self._ledger.add(tier=self.tier, category=category, nbytes=tensor.nbytes)
        return DeviceSlot(name=name, shape=shape, dtype=dtype, tensor=tensor)

    def fetch(self, slot: DeviceSlot) -> Handle:
        _follow(slot)
        return Handle(slot.tensor)

    def has_room(self, slot: DeviceSlot) -> bool:
        return True

    def fetch_ahead(self, slot: DeviceSlot) -> None:
        return None

    def fetch_into(self, slot: DeviceSlot, *, out: Tensor) -> Handle:
        _follow(slot)
        return Handle(out.copy_(slot.tensor))

    def put(self, slot: DeviceSlot, *, value: Tensor) -> Handle:
        if value is slot.tensor:
            return Handle()
        _follow(slot)
        if not has_streams(slot.tensor) or has_streams(value):
            slot.tensor.copy_(value)
            return Handle()
        slot.last_copy = start_copy(value, out=slot.tensor)  # overlaps with the optimizer on the host
        assert slot.last_copy is not None, "the slot is on a GPU"
        return Handle(finish=slot.last_copy.synchronize)

    def release(self, slot: DeviceSlot) -> None:
        pass

    def forget(self, slot: DeviceSlot) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def _follow(slot: DeviceSlot) -> None:
    """Makes the current stream wait until the slot's last copy is done."""
    if slot.last_copy is not None:
        slot.last_copy.wait()
