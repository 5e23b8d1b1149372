"""Common code of the optimizer ops on flat partitions: checks, launches, dispatch, the skipped step, inputs and specs.

[Note: Four per thread]
A thread holds four elements where float32 and 16-bit tensors are combined: more make Triton convert layouts between them through
shared memory (5 to 23 barriers in an elementwise kernel), fewer leave vector loads narrow. Tensors have the dtypes of the op.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ztk.kernels.launch import library
from ztk.kernels.launch.grids import cdiv
from ztk.kernels.launch.jit import Bound, bind, kept
from ztk.kernels.launch.machine import Machine, machine
from ztk.kernels.shared.control import CONTROL_COLUMNS, Control
from ztk.kernels.shared.spec import OpSpec
from ztk.kernels.shared.tiles import (
    ALIGNMENT,
    NUM_WARPS,
    TILE_PER_THREAD,
    UpdatePart,
    check_tiles,
    each_tile,
    threads,
    tiles_of,
)

PER_THREAD = 4  # elements
FLOAT32 = (torch.float32,)
BFLOAT16 = (torch.bfloat16,)
GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Expected = dict[str, tuple[Tensor | None, tuple[torch.dtype, ...]]]


def check(
    op: str,
    *,
    tensors: Expected,
    control: Tensor,
    tiles: Tensor | None,
    groups: Expected | None = None,
    group: int = 1,
) -> None:
    """Raise ValueError unless all are contiguous, of their dtypes and on one device, with a control row float32 [16], or with `tiles` rows of
    them.

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
    if tiles is not None:
        check_tiles(op, tiles=tiles)
    if (
        control.shape[-1:] != (CONTROL_COLUMNS,)
        or control.dim() != (1 if tiles is None else 2)
        or control.dtype != torch.float32
    ):
        wanted = f"one row float32 [{CONTROL_COLUMNS}]" if tiles is None else f"rows float32 [rows, {CONTROL_COLUMNS}]"
        raise ValueError(f"{op}: control is {tuple(control.shape)} {control.dtype}; pass {wanted}")


def register(
    schema: str,
    *,
    kernel: Any,
    update: Callable,
    per_thread: tuple[int, int] = (PER_THREAD, PER_THREAD),
    group: int = 1,
) -> Callable:
    """Register an optimizer op whose last argument is `Tensor? tiles`, int64 [tiles, 4], and return the op to call.

    kernel: takes the schema's tensors, `tiles`, the number of elements, and the schema's integers; its constexprs are the schema's bools in
    capitals, PROGRAMS of a tile, and BLOCK, elements of a program. per_thread: elements of a thread, for 16-bit and for float32 gradients.
    update: takes the schema's arguments without `tiles`, CPU tensors and `control` as a list, by name but for the first. With tiles it is
    called once per tile, and in a skipped step not at all. group: the same as in `check`.
    """
    arguments = [argument.split() for argument in schema[schema.index("(") + 1 : schema.index(") ->")].split(", ")][:-1]
    names = [name for _, name in arguments]
    grad, control = names.index("grad"), names.index("control")
    num_tensors = sum(kind.startswith("Tensor") for kind, _ in arguments)
    flags = [name.upper() for kind, name in arguments if kind == "bool"]

    @kept
    def bound(target: Machine, N: int, tiles: int | None, elements: int, *options: int) -> Bound:
        block, per_tile = elements * threads(target), TILE_PER_THREAD // elements
        assert per_tile or tiles is None, "a tile has a program at least"
        programs = cdiv(N, block) if tiles is None else tiles * per_tile
        numbers, values = options[: len(options) - len(flags)], options[len(options) - len(flags) :]
        sizes = dict(zip(flags, values, strict=True)) | {"PROGRAMS": per_tile, "BLOCK": block}
        return bind(kernel, N, *numbers, grid=(programs,), **sizes, num_warps=NUM_WARPS, enable_fp_fusion=True)

    def launch(*args):
        first, tiles = args[0], args[-1]
        N, count = first.numel(), None if tiles is None else tiles.shape[0]
        if N and count != 0:
            elements = per_thread[args[grad].element_size() == 4]
            bound(machine(first.device), N, count, elements, *args[num_tensors:-1]).launch(*args[:num_tensors], tiles)

    by_tile = by_tiles(update, group=group)

    def cpu(*args):
        *args, tiles = args
        args[control] = rows = args[control].tolist()
        if not (rows if tiles is None else rows[0])[Control.skip]:
            by_tile(tiles=tiles, **dict(zip(names, args, strict=True)))

    return library.register(schema, triton=launch, cpu=cpu, fake=lambda *_: None)


def by_tiles(update: Callable, *, group: int = 1) -> Callable:
    """`update`, which takes an op's arguments without `tiles`, by name but for the first, tile by tile where they are given.

    group: the same as in `check`.
    """

    def run(*, tiles: Tensor | None = None, **named: Any) -> None:
        for part in [named] if tiles is None else each_tile(tiles, group=group, named=named):
            first, *rest = part
            update(part[first], **{name: part[name] for name in rest})

    return run


def dispatch(op: Callable, *, reference: Callable, **named: object) -> None:
    """Call the op with the values in the order of its schema, or the reference by name."""
    if library.use_reference():
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


def make_inputs(
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype,
    device: str,
    states: dict[str, Callable[[Tensor], Tensor]],
    with_out: bool | None = None,
    skip: bool = False,
    eps: float = 1e-8,
    segments: bool = False,
    **options: object,
) -> dict[str, object]:
    """Random inputs of an optimizer op: each state made from random normal [n], `grad` of dtype, a control row, and an `out`
    [n] of a 16-bit dtype if `with_out` (None if the op has no such argument). segments: adds `segment_inputs`."""
    (n,) = shape
    inputs = {name: make(torch.randn(n, device=device)) for name, make in states.items()}
    inputs |= {
        "grad": torch.randn(n, device=device).to(dtype),
        "control": control_row(skip=skip, eps=eps, device=device),
    }
    if with_out is not None:
        half = torch.bfloat16 if dtype == torch.float32 else dtype
        inputs["out"] = torch.zeros(n, dtype=half, device=device) if with_out else None
    return inputs | options | (segment_inputs(n, control=inputs["control"]) if segments else {})


def segment_inputs(n: int, *, control: Tensor) -> dict[str, Tensor]:
    """`tiles` of three segments of [0, n), at positions far from each other, and the two rows of `control`: the given one float32 [16], and one
    without weight decay."""
    cuts = (0, n // 96 * 32, n // 48 * 32, n)
    parts = [
        UpdatePart(start=start, stop=stop, row=place % 2, position=(place << 60) + 32 * start)
        for place, (start, stop) in enumerate(itertools.pairwise(cuts))
    ]
    plain = control.clone()
    plain[Control.lr], plain[Control.weight_decay] = 0.1, 0.0
    return {"tiles": tiles_of(parts, device=control.device), "control": torch.stack([control, plain])}


def spec(name: str, *, op: Callable, traffic: Callable[[int], float], flops: int, **rest: object) -> OpSpec:
    """The OpSpec of an optimizer op: `traffic(itemsize)` bytes and `flops` operations per element."""
    defaults = {"small_shapes": ((16,), (528,), (2064,), (0,)), "bench_shapes": ((1 << 28,), (1_000_000_000,))}
    return OpSpec(
        name=name,
        op=op,
        num_bytes=lambda shape, itemsize: int(shape[0] * traffic(itemsize)),
        num_flops=lambda shape: flops * shape[0],
        **(defaults | rest),
    )
