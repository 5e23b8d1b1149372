"""Registration of the ops with torch, and the one switch that chooses between their implementations.

[Note: Dispatch]
Each op is a `torch.library` schema `ztk::name` with one implementation per dispatch key: CUDA (HIP dispatches as CUDA) runs
the Triton launcher, CPU the fast torch implementation, Meta and fake tensors the shape function. An op has no autograd of
its own: the public function wraps forward and backward ops in a `torch.autograd.Function`, which costs 13 us per call less
than `register_autograd` and also traces under torch.compile. The result of `register` bypasses the dispatcher on a
GPU when nothing intercepts the call (`direct`). `set_backend("reference")` acts in the public functions, so that plain torch
autograd differentiates the reference. Tensors have any dtype.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

from ztk.kernels.launch.direct import first_tensor, is_on_current_gpu, is_plain
from ztk.kernels.launch.functions import is_transformed
from ztk.kernels.launch.private import IS_SHORT

NAMESPACE = "ztk"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
LAUNCHERS: dict[str, Callable] = {}  # by op name; ahead-of-time compilation calls them on tensors without memory


class Backend(StrEnum):
    """Which implementation the ops use in this process."""

    auto = "auto"  # Triton on CUDA and HIP tensors, the torch implementation on CPU tensors
    triton = "triton"  # the Triton kernels everywhere; CPU tensors need TRITON_INTERPRET=1
    reference = "reference"  # the plain torch references everywhere


class Watch(Protocol):
    """Called in place of an op's implementation."""

    def __call__(self, name: str, run: Callable, args: tuple, *, on_gpu: bool) -> Any:
        """Returns `run(*args)`. name: the op's, without the namespace. on_gpu: `run` launches kernels and returns before they end."""

    def bind(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """`call`, whose ops belong to the step after this one."""


_backend = Backend.auto
_watch: Watch | None = None


def set_backend(name: str) -> None:
    """Choose the implementation of every op in this process: "auto", "triton" or "reference". Raises ValueError for others."""
    global _backend
    if name not in list(Backend):
        raise ValueError(f"kernels={name!r} is unknown; choose one of {', '.join(Backend)}")
    _backend = Backend(name)


def get_backend() -> Backend:
    """The implementation chosen by `set_backend`."""
    return _backend


def set_watch(watch: Watch | None) -> None:
    """Makes every op of this process run through `watch`, or as registered if None. See `Watch`."""
    global _watch
    _watch = watch


def get_watch() -> Watch | None:
    """The current watch, or None."""
    return _watch


def behind_step(call: Callable[[], Any]) -> Callable[[], Any]:
    """Wraps a call for a thread that runs during the next step, so that a watch counts its ops in the next step."""
    return call if _watch is None else _watch.bind(call)


def use_reference() -> bool:
    """True when a public function should hand over to its reference."""
    return _backend is Backend.reference


def needs_reference() -> bool:
    """True when a public function with gradients should hand over: also inside transforms and torch.export. See [Note: Transforms]."""
    return _backend is Backend.reference or is_transformed()


def composite(x: Tensor) -> bool:
    """True where plain torch operations with torch's own autograd are the fastest implementation: elementwise ops on CPU.

    Calling a Python-registered op and a Python autograd function costs 20 to 40 us, more than the passes it would save.
    """
    return x.device.type == "cpu" and _backend is Backend.auto


def is_plain_cpu(x: Tensor) -> bool:
    """True where the implementation for a CPU tensor of any shape may be called without the dispatcher: nothing watches or replaces it."""
    return composite(x) and _watch is None


def interpreting() -> bool:
    """True when TRITON_INTERPRET=1 replaced the compiler, so that kernels run on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def register(schema: str, *, triton: Callable, cpu: Callable, fake: Callable) -> Callable:
    """Define `ztk::<schema>` and return the op to call.

    `schema` is a torch schema without the namespace, "swiglu(Tensor gate, Tensor up) -> Tensor"; arguments written in
    place are marked `Tensor(a!)`. `triton` launches the kernel, `cpu` is the torch implementation for CPU tensors, `fake`
    returns empty outputs of the right shape. All three take the schema's arguments.
    """
    name = schema.split("(")[0]
    LAUNCHERS[name] = triton
    LIBRARY.define(schema)
    LIBRARY.impl(name, _cpu_entry(name, triton=triton, cpu=cpu), "CPU")
    LIBRARY.impl(name, _cuda_entry(name, triton), "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    return _short_way(operator(name), launch=triton) if IS_SHORT else operator(name)


def _short_way(op: Any, *, launch: Callable) -> Callable:
    """`op` with a direct call of its launcher when the dispatcher is not needed: see [Note: Cost of the dispatcher]."""
    places: dict[tuple[type, ...], int | None] = {}  # of the first tensor, by the types of the arguments

    def call(*args):
        if _watch is not None or not is_plain():
            return op(*args)
        kinds = (*map(type, args),)
        try:
            place = places[kinds]
        except KeyError:
            place = places[kinds] = first_tensor(op._schema, kinds=kinds)
        if place is None or not is_on_current_gpu(args[place]):
            return op(*args)
        return launch(*args)

    return call


def operator(name: str) -> Callable:
    """`ztk::name` as passed to torch's dispatch modes. Raises AttributeError for an unregistered name."""
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def op_names() -> tuple[str, ...]:
    """Of all ops, in the order of their registration, which is the same in every process."""
    return tuple(LAUNCHERS)


def _cpu_entry(name: str, *, triton: Callable, cpu: Callable) -> Callable:
    def entry(*args):
        run, watch = cpu, _watch
        if _backend is Backend.triton:
            if not interpreting():
                raise ValueError(
                    f"kernels=triton cannot run {name} on CPU tensors; set TRITON_INTERPRET=1 before the first import of "
                    "ztk, or choose kernels=auto"
                )
            run = triton
        return run(*args) if watch is None else watch(name, run, args, on_gpu=False)

    return entry


def _cuda_entry(name: str, launch: Callable) -> Callable:
    def entry(*args):
        device, watch = _first_device(args), _watch
        if device is None or device.index == torch.cuda.current_device():
            return launch(*args) if watch is None else watch(name, launch, args, on_gpu=True)
        with torch.cuda.device(device):  # Triton launches on the current device, independent of the pointers
            return launch(*args) if watch is None else watch(name, launch, args, on_gpu=True)

    return entry


def _first_device(args: tuple) -> torch.device | None:
    for arg in args:
        if isinstance(arg, Tensor):
            return arg.device
        if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor):
            return arg[0].device
    return None
