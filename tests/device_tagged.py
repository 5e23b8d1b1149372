"""Tensors with values in main memory that report a GPU as their device, so that code for a GPU runs on a machine without one.

Within `gpu_tensors()` every tensor that is made on a cuda device is a `Tagged`. An operation that mixes one with a tensor of the CPU (0-dim
tensors and copies excepted) raises DeviceMismatch, as CUDA does. Triton kernels do not run on such tensors; torch's operations do.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_map

DEVICE = torch.device("cuda", 0)
# Operations of CUDA that take tensors of both devices: copies, and indices in main memory. index_add: autograd makes the zeros that it adds
# to in C++, where a tagged tensor is one of the CPU.
MIXED = {"index_add", "copy_", "_to_copy", "index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index"}


class DeviceMismatch(RuntimeError):
    """An operation got tensors of the GPU and of the CPU."""


class Tagged(Tensor):
    """`values`, a tensor in main memory, as a tensor of the GPU."""

    __slots__ = ("values",)  # not among the attributes of a parameter, which optimizers' trials compare
    values: Tensor
    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)

    @staticmethod
    def __new__(cls, values: Tensor) -> "Tagged":
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype, device="cpu"
        )  # fmt: skip
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def cpu(self) -> Tensor:
        """Not an operation for torch, which keeps the tensor in main memory."""
        return self.values.clone()

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device", args[0] if args else None)
        if isinstance(device, str | torch.device) and torch.device(device).type == "cpu":
            rest = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking")}
            return self.values.clone().to(*args[1:], **rest)
        return super().to(*args, **kwargs)

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def tolist(self) -> Any:
        return self.values.tolist()

    def item(self) -> Any:
        return self.values.item()

    def __int__(self) -> int:
        return int(self.values)

    def __float__(self) -> float:
        return float(self.values)

    def __bool__(self) -> bool:
        return bool(self.values)

    def numpy(self) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


@contextmanager
def gpu_tensors() -> Iterator[None]:
    """`device="cuda"` works, and makes `Tagged` tensors."""
    made_of_data = torch.tensor

    def tensor(data: Any, *, dtype=None, device=None, requires_grad=False, pin_memory=False) -> Tensor:
        """Not an operation that a dispatch mode sees."""
        made = made_of_data(data, dtype=dtype)
        made = made.to(DEVICE) if device is not None and torch.device(device).type == "cuda" else made
        return made.requires_grad_(requires_grad)

    with (
        mock.patch.object(torch.cuda, "_lazy_init", lambda: None),
        mock.patch.object(torch.cuda, "_initialized", True),
        mock.patch.object(
            torch.cuda, "get_rng_state", lambda device=None: None
        ),  # no random numbers are drawn on a GPU
        mock.patch.object(torch.cuda, "set_rng_state", lambda state, device=None: None),
        mock.patch.object(torch, "tensor", tensor),
        _Mode(),
    ):
        yield


def move(module: torch.nn.Module, *, device: str) -> None:
    """`module.to` does not support tagged tensors. Tied parameters stay one."""
    moved = {own: torch.nn.Parameter(own.detach().to(device)) for own in module.parameters()}
    for part in module.modules():
        part._parameters = {name: moved.get(own) for name, own in part._parameters.items()}
        part._buffers = {name: None if own is None else own.to(device) for name, own in part._buffers.items()}


@contextmanager
def backward_elsewhere() -> Iterator[None]:
    """Backwards run on threads of their own, as autograd runs those of a GPU's tensors. A backward inside of one stays on its thread."""
    run, caller = torch.autograd._engine_run_backward, threading.get_ident()

    def run_elsewhere(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != caller:
            return run(*args, **kwargs)
        is_enabled, mode = torch.is_grad_enabled(), _get_current_dispatch_mode()

        def compute() -> Any:
            with torch.set_grad_enabled(is_enabled), nullcontext() if mode is None else mode:
                return run(*args, **kwargs)

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(compute).result()

    with mock.patch.object(torch.autograd, "_engine_run_backward", run_elsewhere):
        yield


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    tagged, of_the_cpu = [], []

    def values(x: Any) -> Any:
        if isinstance(x, Tagged):
            tagged.append(x)
            return x.values
        if isinstance(x, Tensor) and x.dim():
            of_the_cpu.append(x)
        return x

    own, named = tree_map(values, args), tree_map(values, kwargs)
    name, device = func._schema.name.partition("::")[2], named.get("device")
    if name == "_pin_memory":  # needs a driver
        return args[0]
    kind = None if device is None else torch.device(device).type
    if tagged and of_the_cpu and name not in MIXED:
        raise DeviceMismatch(f"{name}: tensors of the GPU and of the CPU")
    if kind == "cuda":
        named["device"] = torch.device("cpu")
    named.pop("pin_memory", None)
    if name == "_to_copy":
        dtype, layout = named.get("dtype"), named.get("memory_format") or torch.preserve_format
        result = own[0].to(dtype or own[0].dtype, copy=True, memory_format=layout)
    else:
        result = func(*own, **named)
    to_cpu = kind == "cpu" or (name == "copy_" and not isinstance(args[0], Tagged))
    if to_cpu or not (tagged or kind == "cuda"):
        return args[0] if name == "copy_" else result
    if name.endswith("_") and not name.endswith("__") and isinstance(args[0], Tagged):  # `__rshift__` writes nothing
        return args[0]
    return tree_map(lambda x: Tagged(x) if isinstance(x, Tensor) else x, result)
