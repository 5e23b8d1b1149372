"""The launches of an op, found by running it without a GPU: kernels, arguments, options and grids.

`launches(case, spec=, target=)` runs the op forward and backward on tensors of the meta device. A dispatch mode hands every
ztk op to its Triton launcher, and the launch of a kernel is replaced by one that notes the call. `compile` compiles the notes.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.kernels.aot.case import AotCase
from ztk.kernels.launch.jit import ALIGNMENT, Bound, Prepared
from ztk.kernels.launch.library import LAUNCHERS, NAMESPACE
from ztk.kernels.launch.machine import MACHINES, assume
from ztk.kernels.shared.spec import OpSpec
from ztk.nn import Decoder, DecoderConfig

_POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64", torch.int64: "*i64",
    torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One call `kernel[grid](...)`, specialised as Triton's runtime would."""

    kernel: Any  # triton's JITFunction
    grid: tuple[int, ...]
    signature: dict[str, str]  # name -> type, "constexpr" for compile-time constants
    constexprs: dict[str, object]
    divisible: tuple[str, ...]  # names that are multiples of 16
    options: dict[str, object]  # num_warps, num_stages, num_ctas, enable_fp_fusion, launch_pdl

    @property
    def programs(self) -> int:
        """In the full grid."""
        return math.prod(self.grid)


class Launching(TorchDispatchMode):
    """Every ztk op runs its Triton launcher, on whatever device its tensors are."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == NAMESPACE:
            return LAUNCHERS[func._schema.name.split("::")[1]](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def noting(note: Callable[..., None], *, target: str) -> Iterator[None]:
    """Launches inside, for the target's machine, call `note(kernel, grid, *args, **named)` instead."""

    def run(kernel, *args, grid, warmup, **kwargs):  # of a kernel that `triton.jit` made
        note(kernel, grid, *args, **kwargs)

    def launch_prepared(prepared, grid, *args):
        note(prepared.kernel, grid, *args, **prepared.named)

    def launch_bound(bound, *tensors, count=None):
        launch_prepared(bound.prepared, bound.grid, *bound.arguments(tensors, count=count))

    with (
        assume(MACHINES[target]),
        mock.patch.object(Bound, "launch", launch_bound),
        mock.patch.object(Prepared, "launch", launch_prepared),
        mock.patch.object(JITFunction, "run", run),
    ):
        yield


def run_op(spec: OpSpec, *, case: AotCase) -> None:
    """Runs the op's launchers for the case's shape on tensors without memory, forward then backward. Called inside `noting`."""
    inputs = spec.make_inputs(case.shape, dtype=case.dtype, device="meta", **case.inputs)
    for name in spec.differentiable:
        if inputs[name] is not None:
            inputs[name].requires_grad_()
    with Launching():
        outputs = [out for out in _tensors(spec.op(**inputs)) if out.requires_grad]
        torch.autograd.backward(outputs, [torch.empty_like(out) for out in outputs])


def run_model(config: DecoderConfig, *, dtype: torch.dtype, batch: int, seq_len: int) -> None:
    """Runs the launchers of a training step's forward and backward on tensors without memory. Called inside `noting`."""
    with torch.device("meta"):
        model, tokens = Decoder(config).to(dtype), torch.empty(batch, seq_len, dtype=torch.int64)
    with Launching():
        model(tokens, tokens).backward()


def launches(spec: OpSpec, *, case: AotCase, target: str) -> list[Launch]:
    """Everything that the op launches for the case's shape on the target's machine, forward then backward."""
    found: list[Launch] = []

    def note(kernel, grid, *args, **kwargs):
        found.append(specialised(kernel, args, kwargs, grid=grid))

    with noting(note, target=target):
        run_op(spec, case=case)
    return found


def launch_of(spec: OpSpec, *, case: AotCase, target: str) -> Launch:
    """The single launch of the case. Raises ValueError for no launch, or for two different ones."""
    found = [launch for launch in launches(spec, case=case, target=target) if launch.kernel.__name__ == case.kernel]
    values = [{**launch.signature, **launch.constexprs} for launch in found]
    chosen = [
        launch
        for launch, value in zip(found, values, strict=True)
        if all(value.get(name) == wanted for name, wanted in case.where.items())
    ]
    if not chosen or any(launch != chosen[0] for launch in chosen):
        raise ValueError(f"AotCase {case.name}: {len(chosen)} launches of {len(found)} fit where={dict(case.where)}")
    return chosen[0]


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def specialised(kernel: JITFunction, args: tuple, kwargs: dict, *, grid: tuple[int, ...]) -> Launch:
    names = kernel.arg_names
    values = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
    signature, constexprs, divisible = {}, {}, []
    for name, parameter in zip(names, kernel.params, strict=True):
        value, fixed = values[name], getattr(parameter, "do_not_specialize", False)
        kind = _kind(value, fixed=fixed)
        signature[name] = "constexpr" if parameter.is_constexpr else kind
        if signature[name] == "constexpr":
            constexprs[name] = value
        elif isinstance(value, Tensor):
            if value.storage_offset() * value.element_size() % ALIGNMENT == 0:
                divisible.append(name)
        elif isinstance(value, int) and value % ALIGNMENT == 0 and not fixed:
            divisible.append(name)
    options = {name: value for name, value in kwargs.items() if name not in names}
    return Launch(
        kernel=kernel, grid=tuple(grid), signature=signature, constexprs=constexprs, divisible=tuple(divisible),
        options=options,
    )  # fmt: skip


def _kind(value: object, *, fixed: bool) -> str:
    """The type of a value in Triton's runtime: None and the integer 1 are compile-time constants."""
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_POINTERS[value.base.dtype][1:]}{value.block_shape}>"
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int) and (value != 1 or fixed):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "constexpr"
