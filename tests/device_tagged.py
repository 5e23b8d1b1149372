"""Tensors with values in main memory that report a GPU as their device, so that code for a GPU runs on a machine without one.

Within `gpu_tensors()` a tensor that is made on a cuda device is an ordinary one whose storage has a tag, and the attributes of
`torch.Tensor` tell of it. An operation that mixes tagged memory with other memory (0-dim tensors and copies excepted) raises
DeviceMismatch, as CUDA does. Triton kernels do not run on such tensors; torch's operations and the ops' CPU implementations do.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ztk.core.runtime.streams import CudaStreams

DEVICE, CPU = torch.device("cuda", 0), torch.device("cpu")
# Operations of CUDA that take tensors of both devices: copies, and indices in main memory.
MIXED = {"copy_", "_to_copy", "index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index"}
# Operations of CUDA whose results the host waits for.
WAITED = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_consecutive"}
_BASE = torch._C.TensorBase
_OF_DISPATCH = torch._compile.__file__, torch._dynamo.__path__[0]  # files of frames between an operation and its mode


class DeviceMismatch(RuntimeError):
    """An operation got tensors of the GPU and of the CPU."""


class Record:
    """Calls of a GPU's driver.

    reads: functions of ztk in which the host waits for values of the GPU. pageable: functions that start a copy between a GPU and memory that
    is not page-locked, which the host would wait for. locked: bytes of page-locked mappings, by address.
    """

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.pageable: list[str] = []
        self.locked: dict[int, int] = {}

    def copied(self, source: Tensor, *, to_gpu: bool, out: Tensor | None, non_blocking: bool) -> None:
        """Notes a copy between host and GPU. out: None if the copy allocates its result."""
        host = source if to_gpu else out
        if non_blocking and host is not None and not self.is_locked(host):
            self.pageable.append(_caller())
        elif not non_blocking and not to_gpu:
            self.reads.append(_caller())

    def is_locked(self, tensor: Tensor) -> bool:
        """Whether `tensor` (any shape) is in page-locked memory."""
        start = _BASE.data_ptr(tensor)
        mapped = any(first <= start < first + nbytes for first, nbytes in self.locked.items())
        return mapped or getattr(_BASE.untyped_storage(tensor), "is_locked", False)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


class Streams(CudaStreams):
    """Streams whose work ends as it is given to them."""

    def current(self, device: torch.device) -> "_Ended":
        return _ENDED

    def new(self, device: torch.device) -> "_Ended":
        return _ENDED

    def use(self, stream: "_Ended"):
        return nullcontext()

    def keep_for(self, tensor: Tensor, *, stream: "_Ended") -> None:
        pass

    def is_capturing(self) -> bool:
        return False


class _Ended:
    """A stream, and each of its events."""

    def record_event(self) -> "_Ended":
        return self

    def wait_event(self, event: "_Ended") -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


_ENDED = _Ended()


def tag(tensor: Tensor) -> Tensor:
    """Makes the memory of `tensor` (any shape) the GPU's."""
    _BASE.untyped_storage(tensor).is_of_gpu = True
    return tensor


def untagged(tensor: Tensor) -> Tensor:
    """`tensor` (contiguous, any shape) as one of the CPU in the same memory, for stand-ins of kernels."""
    return torch.frombuffer(_BASE.numpy(tensor.detach().view(-1).view(torch.uint8)), dtype=tensor.dtype).view(
        tensor.shape
    )


@contextmanager
def gpu_tensors() -> Iterator[Record]:
    """`device="cuda"` works, and makes tagged tensors, also in threads that start inside."""
    record, run = Record(), threading.Thread.run

    def run_in_mode(thread: threading.Thread) -> None:
        with _Mode(record):
            run(thread)

    cuda = {
        "_lazy_init": lambda: None,
        "_initialized": True,
        "get_rng_state": lambda device=None: None,  # no random numbers are drawn on a GPU
        "set_rng_state": lambda state, device=None: None,
        "synchronize": lambda device=None: None,
        "get_device_capability": lambda device=None: (9, 0),  # `torch.distributed.broadcast` reads it
        "cudart": lambda: record,
        "mem_get_info": lambda device=None: (1 << 34, 1 << 34),
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
    }
    with ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for name, value in _attributes(record).items():
            stack.enter_context(mock.patch.object(Tensor, name, value))
        stack.enter_context(mock.patch.object(torch, "tensor", _without_operation(torch.tensor)))
        stack.enter_context(mock.patch.object(threading.Thread, "run", run_in_mode))
        stack.enter_context(_Mode(record))
        yield record


def move(module: torch.nn.Module, *, device: str) -> None:
    """`module.to(device)` with new parameters, of which tied ones stay one."""
    moved = {own: torch.nn.Parameter(own.detach().to(device)) for own in module.parameters()}
    for part in module.modules():
        part._parameters = {name: moved.get(own) for name, own in part._parameters.items()}
        part._buffers = {name: None if own is None else own.to(device) for name, own in part._buffers.items()}


@contextmanager
def products_of_torch() -> Iterator[None]:
    """`ztk.nn.linear` multiplies by torch's operation on every device, as on a GPU. On the CPU it calls oneDNN, which rounds differently from
    MKL on some processors, so equal bits of CPU and tagged tensors need it."""
    with mock.patch.object(sys.modules["ztk.nn.linear"], "_is_for_onednn", lambda a, b: False):
        yield


@contextmanager
def backward_elsewhere() -> Iterator[None]:
    """Backwards run on threads of their own, as autograd does for a GPU's tensors. A backward inside of one stays on its thread."""
    run, caller = torch.autograd._engine_run_backward, threading.get_ident()

    def run_elsewhere(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != caller:
            return run(*args, **kwargs)
        is_enabled = torch.is_grad_enabled()

        def compute() -> Any:
            with torch.set_grad_enabled(is_enabled):
                return run(*args, **kwargs)

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(compute).result()

    with mock.patch.object(torch.autograd, "_engine_run_backward", run_elsewhere):
        yield


class _Mode(TorchDispatchMode):
    sees_everything = True  # also operations that ZeRO hides from modes, see `ztk.core.runtime.dispatch_modes`

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        given = list(_tensors(args)) + list(_tensors(kwargs.values()))
        own = [x for x in given if _is_tagged(x)]
        name, target = func._schema.name.partition("::")[2], kwargs.get("device")
        target = None if target is None else torch.device(target)
        if name == "_pin_memory":
            return self._lock(args[0].clone())
        if _is_by_autograd(sys._getframe(1)):  # its C++ takes the device of a tagged tensor for the CPU
            target = None if target is None else DEVICE
        if own and name not in MIXED and (other := [x for x in given if x.dim() and not _is_tagged(x)]):
            raise DeviceMismatch(
                f"{name}: tensors of the GPU and of the CPU: {[tuple(x.shape) for x in (*own, *other)]}"
            )
        is_locked = kwargs.pop("pin_memory", False)
        if target is not None and target.type == "cuda":
            kwargs["device"] = CPU
        self._note(name, args=args, kwargs=kwargs, own=own, target=target)
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if "only supports per-tensor scaling for CPU" not in str(error):
                raise
            result = _scaled_product(*args, **kwargs)
        if name == "copy_":
            return result
        if target.type == "cuda" if target is not None else own:
            for made in _tensors((result,)):
                tag(made)
        return self._lock(result) if is_locked else result

    def _note(self, name: str, *, args: tuple, kwargs: dict, own: list[Tensor], target: torch.device | None) -> None:
        if name == "copy_" and len(own) == 1:
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            self._record.copied(args[1], to_gpu=own[0] is args[0], out=args[0], non_blocking=non_blocking)
        elif name == "_to_copy" and target is not None and target.type != ("cuda" if own else "cpu"):
            self._record.copied(args[0], to_gpu=not own, out=None, non_blocking=kwargs.get("non_blocking", False))
        elif own and (
            name in WAITED or (name == "index" and any(x.dtype == torch.bool for x in args[1] if x is not None))
        ):
            self._record.reads.append(_caller())

    def _lock(self, tensor: Tensor) -> Tensor:
        _BASE.untyped_storage(tensor).is_locked = True
        return tensor


def _scaled_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *_: Any, out: Tensor | None = None, **__: Any
):
    """`torch._scaled_mm` with scales per row and column, which the CPU's of torch 2.11 lacks."""
    product = ((a.float() @ b.float()) * scale_a * scale_b).bfloat16()
    return product if out is None else out.copy_(product)


def _is_tagged(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        if _BASE.layout.__get__(tensor) is not torch.strided:
            return False
        return getattr(_BASE.untyped_storage(tensor), "is_of_gpu", False)


def _tensors(values: Iterable) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether `tensor` (any shape) reports a GPU. False inside of the CPU implementation of an op, without modes."""
    return torch._C._len_torch_dispatch_stack() > 0 and _is_tagged(tensor)


def _is_by_autograd(frame: FrameType | None) -> bool:
    """Whether C++ of a backward of the GPU has called the operation."""
    while frame is not None and frame.f_code.co_filename.startswith(_OF_DISPATCH):
        frame = frame.f_back
    if frame is None or frame.f_code.co_name != "_engine_run_backward":
        return False
    return _is_tagged(frame.f_locals["t_outputs"][0])


def _caller() -> str:
    """The innermost function of ztk that runs now, without those that read for others."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("ztk.") and module not in ("ztk.core.runtime.planned", "ztk.core.runtime.streams"):
            return f"{module}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return ""


def _without_operation(made_of_data: Callable) -> Callable:
    """`torch.tensor`, which a dispatch mode does not see."""

    def tensor(data: Any, *, dtype=None, device=None, requires_grad=False, pin_memory=False) -> Tensor:
        made = made_of_data(data, dtype=dtype)
        made = made.to(DEVICE) if device is not None and torch.device(device).type == "cuda" else made
        return made.requires_grad_(requires_grad)

    return tensor


def _attributes(record: Record) -> dict[str, Any]:
    """Attributes that torch answers without an operation."""

    def to(self: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            args = args[0].device, args[0].dtype, *args[1:]
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if device is None or device.type == self.device.type:
            layout = {} if memory_format is None else {"memory_format": memory_format}
            return _BASE.to(self, dtype=self.dtype if dtype is None else dtype, copy=copy, **layout)
        return torch.ops.aten._to_copy(
            self, dtype=dtype, device=device, non_blocking=non_blocking, memory_format=memory_format
        )

    def numpy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_on_gpu(self):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return _BASE.numpy(self, *args, **kwargs)

    def tolist(self: Tensor) -> Any:
        if is_on_gpu(self):
            record.reads.append(_caller())
        return _BASE.tolist(self)

    return {
        "device": property(lambda self: DEVICE if is_on_gpu(self) else _BASE.device.__get__(self)),
        "is_cuda": property(is_on_gpu),
        "is_cpu": property(lambda self: not is_on_gpu(self) and _BASE.is_cpu.__get__(self)),
        "to": to,
        "cpu": lambda self: self.to(CPU),
        "cuda": lambda self: self.to(DEVICE),
        "is_pinned": lambda self: record.is_locked(self),
        "numpy": numpy,
        "tolist": tolist,
    }
