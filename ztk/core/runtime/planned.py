"""Tensors of a plan: on the meta device, with shapes and without values (`ztk.planner`).

What the host reads of tensors' values has its one place here, and what takes a tensor for the same as another looks at its storage: an
address is 0 on the meta device.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

PLANNED = torch.device("meta")
_watching: list[Callable[[str], None]] = []
_host: set[int] = set()  # storages of planned tensors that stand for host memory


def is_planned(device: torch.device) -> bool:
    """`device` computes nothing: what runs there is a plan."""
    return device.type == "meta"


def place_of(tensor: Tensor) -> tuple[int, int]:
    """Identity of the storage of a tensor of any shape, and the byte where the tensor begins. Valid while the tensor lives."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset() * tensor.element_size()


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Inside, operations on `device` compute in their tensors' dtypes; planned tensors always do."""
    return nullcontext() if is_planned(device) else torch.autocast(device.type, enabled=False)


def note_read(what: str) -> None:
    """The host reads `what` from the device now, or a run on a GPU would. Says so to whoever watches."""
    for seen in _watching:
        seen(what)


@contextmanager
def watch_reads(seen: Callable[[str], None]) -> Iterator[None]:
    """Inside, `seen` is called with the name of everything that the host reads of values that the device has computed."""
    _watching.append(seen)
    try:
        yield
    finally:
        _watching.remove(seen)


def on_host(values: Tensor, *, what: str) -> Tensor:
    """`values`, of any shape, in host memory. Waits for the device. what: they are, see `watch_reads`."""
    note_read(what)
    if not values.is_meta:
        return values.cpu()
    return host_bytes(values.nbytes).view(values.dtype).view(values.shape).copy_(values)


def in_one_memory(first: Tensor, *, second: Tensor) -> bool:
    """Two tensors of any shapes are on one device, and in a plan both stand for its memory or both for the host's."""
    if first.device != second.device:
        return False
    return not first.is_meta or is_host_memory(first.untyped_storage()) == is_host_memory(second.untyped_storage())


def is_set(flag: Tensor, *, what: str) -> bool:
    """A device scalar [] as a bool. Waits for the device. A planned flag is not set: a plan skips no step. what: see `watch_reads`."""
    note_read(what)
    return not flag.is_meta and bool(flag)


def host_bytes(nbytes: int) -> Tensor:
    """uint8 [nbytes], planned, that stands for host memory: what counts the device's bytes leaves it out."""
    with _disable_current_modes():  # a mode would see the storage before it is known as the host's
        memory = torch.empty(nbytes, dtype=torch.uint8, device=PLANNED)
    storage = memory.untyped_storage()
    _host.add(storage._cdata)
    # pyrefly: ignore[missing-attribute]  # a property, which typeshed leaves out of __slots__
    weakref.finalize(storage, _host.discard, storage._cdata).atexit = False
    return memory


def is_host_memory(storage: torch.UntypedStorage) -> bool:
    """A planned storage that `host_bytes` made."""
    return storage._cdata in _host
