"""Tensors of a plan: on the meta device, with shapes and without values (`ztk.planner`).

All reads of tensor values by the host go through this module. Tensors are compared by their storage, because every address is 0 on the
meta device.

[Note: Host reads]
A step of a dense model whose states are on the device reads nothing on the host: loss scale, norm, clipping, rate and the decision to skip
stay on the device, so the step can be recorded into a CUDA graph (`torch.cuda.graph(graph, capture_error_mode="thread_local")`, because the
watchdog asks for events from its own thread). A graph repeats decisions that the host makes by counting: record all micro-batches of a
step, and none at which `ema.every` above 1 or an evaluation is due. The reads of other steps:

- `overflow status of the step before`: every step on a GPU that is not being recorded. It ends a run whose gradients stay infinite; it is a
  step old, so the host does not wait. In a graph `read_metrics` shows it.
- `decision to step: states are updated on the host`: `offload=cpu` and `nvme`.
- `decision to step: the optimizer does not read it`: offloaded states or parameters, Muon, LAMB, torch's optimizers. Buffers are written to
  a store, matrices are sent, or torch's step runs only if the step is not skipped.
- `rows per rank of the experts`: `topology.expert` above 1, once per layer and micro-batch. An all-to-all needs its sizes on the host; they
  arrive while tokens are sorted. A repeated forward has the sizes of the first: [Note: One read per layer] in `ztk/parallel/moe/exchange.py`.
- `numbers of ranks: ...`, `objects of ranks`, `an object of another rank`: the first backward, `skip_unused`, the first micro-batch of a
  pipeline. Ranks agree on an order, on names, on shapes.
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
    """Whether `device` computes nothing, because the run is a plan."""
    return device.type == "meta"


def place_of(tensor: Tensor) -> tuple[int, int]:
    """Storage identity of a tensor (any shape) and the byte where the tensor begins. Valid while the tensor lives."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset() * tensor.element_size()


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Inside, operations on `device` compute in their tensors' dtypes; planned tensors always do."""
    return nullcontext() if is_planned(device) else torch.autocast(device.type, enabled=False)


def note_read(name: str) -> None:
    """Reports that the host reads the value `name` from the device here, or would read it in a run on a GPU. Calls the watchers."""
    for seen in _watching:
        seen(name)


@contextmanager
def watch_reads(seen: Callable[[str], None]) -> Iterator[None]:
    """Context in which `seen` is called with the name of every device value that the host reads."""
    _watching.append(seen)
    try:
        yield
    finally:
        _watching.remove(seen)


def on_host(values: Tensor, *, name: str) -> Tensor:
    """`values` (any shape) in host memory. Waits for the device. name: label of the values, passed to `watch_reads`."""
    note_read(name)
    if not values.is_meta:
        return values.cpu()
    return host_bytes(values.nbytes).view(values.dtype).view(values.shape).copy_(values)


def in_one_memory(first: Tensor, *, second: Tensor) -> bool:
    """Whether two tensors (any shapes) are on one device. In a plan, whether both stand for device memory or both for host memory."""
    if first.device != second.device:
        return False
    return not first.is_meta or is_host_memory(first.untyped_storage()) == is_host_memory(second.untyped_storage())


def is_set(flag: Tensor, *, name: str) -> bool:
    """A device scalar [] as a bool. Waits for the device. False for a planned flag: a plan skips no step. name: see `watch_reads`."""
    note_read(name)
    return not flag.is_meta and bool(flag)


def host_bytes(nbytes: int) -> Tensor:
    """Planned uint8 [nbytes] that stands for host memory and is left out of counts of device memory."""
    with _disable_current_modes():  # else a mode would count the storage before it is registered as host memory
        memory = torch.empty(nbytes, dtype=torch.uint8, device=PLANNED)
    storage = memory.untyped_storage()
    _host.add(storage._cdata)
    # pyrefly: ignore[missing-attribute]  # a property, which typeshed leaves out of __slots__
    weakref.finalize(storage, _host.discard, storage._cdata).atexit = False
    return memory


def is_host_memory(storage: torch.UntypedStorage) -> bool:
    """Whether `host_bytes` made this planned storage."""
    return storage._cdata in _host
