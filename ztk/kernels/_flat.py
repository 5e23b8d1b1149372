"""What the optimizer ops on flat partitions share: checks, launches, dispatch, the skipped step, inputs and specs.

[Note: Four per thread]
A thread holds four elements where float32 and 16-bit tensors are combined: more make Triton convert layouts between them through
shared memory (5 to 23 barriers in an elementwise kernel), fewer leave vector loads narrow. Tensors have the dtypes that the op gives them.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ztk.kernels._control import CONTROL_COLUMNS, Control
from ztk.kernels._jit import Bound, bind, kept
from ztk.kernels._library import register, use_reference
from ztk.kernels._machine import machine
from ztk.kernels._sizes import cdiv
from ztk.kernels._spec import AotCase, OpSpec

ALIGNMENT = 16  # elements: a partition consists of 64-byte units of float32
NUM_WARPS = 4
PER_THREAD = 4  # elements
FLOAT32 = (torch.float32,)
BFLOAT16 = (torch.bfloat16,)
GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AOT_ELEMENTS = 1 << 22

Expected = dict[str, tuple[Tensor | None, tuple[torch.dtype, ...]]]


def check_flat(op: str, *, tensors: Expected, control: Tensor, groups: Expected | None = None, group: int = 1) -> None:
    """Raise ValueError unless all are contiguous, of their dtypes and on one device, with a control row float32 [16].

    tensors: name -> (tensor [n] or None, its dtypes), the first being the parameters; n a multiple of 16. groups: the same
    for tensors [ceil(n / group)].
    """
    first, (param, _) = next(iter(tensors.items()))
    assert param is not None
    n = param.numel()
    if n % ALIGNMENT:
        raise ValueError(f"{op}: {first} has {n} elements; pad the flat partition to a multiple of {ALIGNMENT}")
    sized = [(name, *entry, n) for name, entry in tensors.items()]
    sized += [(name, *entry, cdiv(n, group)) for name, entry in (groups or {}).items()]
    for name, tensor, dtypes, size in sized:
        if tensor is None:
            continue
        if tensor.shape != (size,) or tensor.dtype not in dtypes or not tensor.is_contiguous():
            raise ValueError(
                f"{op}: {name} is {tuple(tensor.shape)} {tensor.dtype}; it must be contiguous [{size}] of "
                f"{' or '.join(str(d)[6:] for d in dtypes)}"
            )
        if tensor.device != param.device:
            raise ValueError(f"{op}: {name} is on {tensor.device} and {first} on {param.device}; move one of them")
    if control.shape != (CONTROL_COLUMNS,) or control.dtype != torch.float32:
        raise ValueError(
            f"{op}: control is {tuple(control.shape)} {control.dtype}; pass one row float32 [{CONTROL_COLUMNS}]"
        )


def flat_launches(kernel: Any, *names: str) -> Callable[..., Bound]:
    """Of a kernel of tensors, their number of elements and further numbers: sizes, those numbers, and the constexprs of these names -> a
    launch of so many programs."""

    @kept
    def bound(N: int, block: int, programs: int, numbers: tuple[int, ...], *constexprs: object) -> Bound:
        named = dict(zip(names, constexprs, strict=True))
        return bind(
            kernel, N, *numbers, grid=(programs,), **named, BLOCK=block, num_warps=NUM_WARPS, enable_fp_fusion=True
        )

    return bound


def launch_flat(
    launches: Callable[..., Bound],
    *tensors: Tensor | None,
    numbers: tuple[int, ...] = (),
    per_thread: int = PER_THREAD,
    constexprs: tuple = (),
) -> None:
    """Launch of `flat_launches` over the elements of the first tensor, in tiles of BLOCK elements."""
    first = tensors[0]
    assert first is not None
    if N := first.numel():
        block = per_thread * machine(first.device).warp_size * NUM_WARPS
        launches(N, block, cdiv(N, block), numbers, *constexprs).launch(*tensors)


def tiles_of(segments: Sequence[tuple[int, int, int]], *, device: torch.device) -> Tensor:
    """int32 [tiles, 3] on `device`: first element, end and row of the control table of every program of one launch over many segments.

    segments: (start, stop, row), multiples of 16 below 2^31 but for the row. To be made once: it comes from the host.
    """
    block = PER_THREAD * machine(device).warp_size * NUM_WARPS
    tiles = [
        (first, min(first + block, stop), row) for start, stop, row in segments for first in range(start, stop, block)
    ]
    assert all(first % ALIGNMENT == 0 and stop % ALIGNMENT == 0 for first, stop, _ in tiles), "segments are padded"
    if device.type == "meta":
        return torch.empty((len(tiles), 3), dtype=torch.int32, device=device)
    return torch.tensor(tiles, dtype=torch.int32).reshape(-1, 3).to(device)


def launch_tiles(launches: Callable[..., Bound], *tensors: Tensor | None, constexprs: tuple = ()) -> None:
    """The same with a program for each of the last tensor's tiles, int32 [tiles, 3]."""
    first, tiles = tensors[0], tensors[-1]
    assert first is not None and tiles is not None
    if programs := tiles.shape[0]:
        block = PER_THREAD * machine(first.device).warp_size * NUM_WARPS
        launches(first.numel(), block, programs, (), *constexprs).launch(*tensors)


def register_update(schema: str, *, launch: Callable, update: Callable) -> Callable:
    """Register an optimizer op. `update` works on CPU tensors, with `control` as a list, or as a list of rows; a skipped step does not reach
    it."""
    place = list(inspect.signature(update).parameters).index("control")

    def cpu(*args):
        control = args[place].tolist()
        row = control if args[place].dim() == 1 else control[0]
        if not row[Control.skip]:
            update(*args[:place], control, *args[place + 1 :])

    return register(schema, triton=launch, cpu=cpu, fake=lambda *_: None)


def dispatch(op: Callable, *, reference: Callable, **named: object) -> None:
    """Call the op with the values in the order of its schema, or the reference by name."""
    if use_reference():
        reference(**named)
    else:
        op(*named.values())


def write_unless_skipped(control: Tensor, *pairs: tuple[Tensor | None, Tensor]) -> None:
    """Copy new into old, of one shape, cast, for each (old, new) of a reference, unless the step is skipped; None takes nothing."""
    keep = control[Control.skip] != 0
    for old, new in pairs:
        if old is not None:
            old.copy_(torch.where(keep, old, new.to(old.dtype)))


def control_row(
    *,
    step: int = 3,
    skip: bool = False,
    grad_coefficient: float = 0.5,
    lr: float = 1e-2,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    momentum: float = 0.9,
    device: str = "cpu",
) -> Tensor:
    """A control row float32 [16] as `step_control` would write it."""
    row = [0.0] * CONTROL_COLUMNS
    row[Control.skip] = float(skip)
    row[Control.grad_coefficient] = grad_coefficient
    row[Control.lr] = lr
    row[Control.beta1], row[Control.beta2] = betas
    row[Control.eps], row[Control.weight_decay], row[Control.momentum] = eps, weight_decay, momentum
    row[Control.bias_correction1] = 1 - betas[0] ** step
    row[Control.bias_correction2_sqrt] = (1 - betas[1] ** step) ** 0.5
    row[Control.step] = step
    return torch.tensor(row, dtype=torch.float32, device=device)


def make_flat_inputs(
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype,
    device: str,
    states: dict[str, Callable[[Tensor], Tensor]],
    with_out: bool | None = None,
    skip: bool = False,
    eps: float = 1e-8,
    **options: object,
) -> dict[str, object]:
    """Random inputs of an optimizer op: each state made from random normal [n], `grad` of dtype, a control row, and an `out`
    [n] of a 16-bit dtype where `with_out` (None: the op has none)."""
    (n,) = shape
    inputs = {name: make(torch.randn(n, device=device)) for name, make in states.items()}
    inputs |= {
        "grad": torch.randn(n, device=device).to(dtype),
        "control": control_row(skip=skip, eps=eps, device=device),
    }
    if with_out is not None:
        half = torch.bfloat16 if dtype == torch.float32 else dtype
        inputs["out"] = torch.zeros(n, dtype=half, device=device) if with_out else None
    return inputs | options


def flat_spec(
    name: str, *, op: Callable, traffic: Callable[[int], float], flops: int, aot: tuple[AotCase, ...], **rest: object
) -> OpSpec:
    """The OpSpec of an optimizer op: `traffic(itemsize)` bytes and `flops` operations per element."""
    defaults = {"small_shapes": ((16,), (528,), (2064,), (0,)), "bench_shapes": ((1 << 28,), (1_000_000_000,))}
    return OpSpec(
        name=name,
        op=op,
        num_bytes=lambda shape, itemsize: int(shape[0] * traffic(itemsize)),
        num_flops=lambda shape: flops * shape[0],
        aot=aot,
        **(defaults | rest),
    )


def flat_case(kernel: Callable, **budget: object) -> AotCase:
    """One elementwise launch: no barriers, and registers for twelve programs of 128 threads per processor at least."""
    defaults = {"shape": (AOT_ELEMENTS,), "elements": AOT_ELEMENTS, "min_programs": 12, "max_barriers": 0}
    return AotCase(kernel=kernel, **(defaults | budget))
