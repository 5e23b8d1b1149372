"""Copies of many tensors into and out of a flat buffer, cast on the way.

    flatten_into:   out[offsets[i] : offsets[i] + n_i] = tensors[i] * scale
    unflatten_from: tensors[i] = flat[offsets[i] : offsets[i] + n_i]

Each reads and writes every byte once, in one launch for any number of tensors: a table on the device holds the addresses
and offsets, and a map gives the tensor of each tile. The table is rebuilt only when an address changes.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels._library import register, use_reference
from ztk.kernels._machine import machine
from ztk.kernels._math import cast
from ztk.kernels._pointers import MAX_VECTOR, TILE, pointer_table, triton_dtype
from ztk.kernels._spec import AotCase, OpSpec
from ztk.kernels.cast_copy import cast_copy_reference, copy_scaled


def _num_warps(*tensors: Tensor) -> int:
    """Warps for which a thread copies one 16-byte access of the wider dtype, twice where the dtypes are the same."""
    narrow = tensors[0].dtype == tensors[1].dtype
    return TILE // ((16 if narrow else 4) * machine(tensors[1].device).warp_size)


@triton.jit
def _gather(
    table_ptr, tile_tensor_ptr, flat_ptr, scale_ptr, num_tensors,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, VECTOR: tl.constexpr, HAS_SCALE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """flat[offset + k] = tensor[k] * scale, one tile of one tensor"""
    i_tile = tl.program_id(0).to(tl.int64)
    i_tensor = tl.load(tile_tensor_ptr + i_tile).to(tl.int64)
    p_x = tl.load(table_ptr + i_tensor).to(tl.pointer_type(DTYPE))
    offset = tl.load(table_ptr + num_tensors + i_tensor)
    numel = tl.load(table_ptr + 2 * num_tensors + i_tensor)
    first = tl.load(table_ptr + 3 * num_tensors + i_tensor)
    if ALIGNED:  # stated after the cast to a pointer: on the integer it would be lost
        p_x = tl.multiple_of(p_x, 16)
        offset = tl.multiple_of(offset, VECTOR)
        numel = tl.multiple_of(numel, VECTOR)
    o_n = (i_tile - first) * TILE + tl.arange(0, TILE)
    m_n = o_n < numel
    b_x = tl.load(p_x + o_n, mask=m_n, other=0.0).to(tl.float32)
    if HAS_SCALE:
        b_x = b_x * tl.load(scale_ptr)
    tl.store(flat_ptr + offset + o_n, cast(b_x, flat_ptr.dtype.element_ty), mask=m_n)


@triton.jit
def _scatter(
    table_ptr, tile_tensor_ptr, flat_ptr, num_tensors,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, VECTOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """tensor[k] = flat[offset + k], one tile of one tensor"""
    i_tile = tl.program_id(0).to(tl.int64)
    i_tensor = tl.load(tile_tensor_ptr + i_tile).to(tl.int64)
    p_x = tl.load(table_ptr + i_tensor).to(tl.pointer_type(DTYPE))
    offset = tl.load(table_ptr + num_tensors + i_tensor)
    numel = tl.load(table_ptr + 2 * num_tensors + i_tensor)
    first = tl.load(table_ptr + 3 * num_tensors + i_tensor)
    if ALIGNED:
        p_x = tl.multiple_of(p_x, 16)
        offset = tl.multiple_of(offset, VECTOR)
        numel = tl.multiple_of(numel, VECTOR)
    o_n = (i_tile - first) * TILE + tl.arange(0, TILE)
    m_n = o_n < numel
    b_x = tl.load(flat_ptr + offset + o_n, mask=m_n, other=0.0).to(tl.float32)
    tl.store(p_x + o_n, cast(b_x, DTYPE), mask=m_n)


def _launch_gather(tensors: Sequence[Tensor], out: Tensor, offsets: Sequence[int], scale: Tensor | None) -> None:
    table = pointer_table(tensors, flat=out, offsets=offsets)
    if table.num_tiles:
        _gather[(table.num_tiles,)](
            table.table, table.tile_tensor, out, table.table if scale is None else scale, table.num_tensors,
            DTYPE=triton_dtype(tensors[0]), ALIGNED=table.aligned, VECTOR=MAX_VECTOR, HAS_SCALE=scale is not None,
            TILE=TILE, num_warps=_num_warps(tensors[0], out), enable_fp_fusion=True,
        )  # fmt: skip


def _launch_scatter(flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> None:
    table = pointer_table(tensors, flat=flat, offsets=offsets)
    if table.num_tiles:
        _scatter[(table.num_tiles,)](
            table.table, table.tile_tensor, flat, table.num_tensors,
            DTYPE=triton_dtype(tensors[0]), ALIGNED=table.aligned, VECTOR=MAX_VECTOR,
            TILE=TILE, num_warps=_num_warps(tensors[0], flat), enable_fp_fusion=True,
        )  # fmt: skip


def _cpu_gather(tensors: Sequence[Tensor], out: Tensor, offsets: Sequence[int], scale: Tensor | None) -> None:
    for tensor, offset in zip(tensors, offsets, strict=True):
        copy_scaled(tensor.view(-1), out[offset : offset + tensor.numel()], scale)


def _cpu_scatter(flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> None:
    for tensor, offset in zip(tensors, offsets, strict=True):
        tensor.view(-1).copy_(flat[offset : offset + tensor.numel()])


_gather_op = register(
    "flatten_into(Tensor[] tensors, Tensor(a!) out, int[] offsets, Tensor? scale) -> ()",
    triton=_launch_gather,
    cpu=_cpu_gather,
    fake=lambda tensors, out, offsets, scale: None,
)
_scatter_op = register(
    "unflatten_from(Tensor flat, Tensor(a!)[] tensors, int[] offsets) -> ()",
    triton=_launch_scatter,
    cpu=_cpu_scatter,
    fake=lambda flat, tensors, offsets: None,
)


def flatten_into(
    tensors: Sequence[Tensor], *, out: Tensor, offsets: Sequence[int], scale: Tensor | None = None
) -> None:
    """Copy every tensor into out[offsets[i] : offsets[i] + numel], cast, times the device scalar `scale` [1] when given.

    The tensors are contiguous, of any shape and one dtype; `offsets` are elements of the flat `out`. One launch.
    """
    _check_table("flatten_into", tensors, flat=out, offsets=offsets)
    if not tensors:
        return
    if use_reference():
        flatten_into_reference(tensors, out=out, offsets=offsets, scale=scale)
    else:
        _gather_op(list(tensors), out, list(offsets), scale)


def unflatten_from(flat: Tensor, *, tensors: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """Copy flat[offsets[i] : offsets[i] + numel] into every tensor in place, cast. The inverse of `flatten_into`."""
    _check_table("unflatten_from", tensors, flat=flat, offsets=offsets)
    if not tensors:
        return
    if use_reference():
        unflatten_from_reference(flat, tensors=tensors, offsets=offsets)
    else:
        _scatter_op(flat, list(tensors), list(offsets))


def _check_table(op: str, tensors: Sequence[Tensor], *, flat: Tensor, offsets: Sequence[int]) -> None:
    if len(tensors) != len(offsets):
        raise ValueError(f"{op}: {len(tensors)} tensors and {len(offsets)} offsets; give one offset per tensor")
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(f"{op}: the flat buffer is {tuple(flat.shape)}; it must be contiguous with one dimension")
    for i, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)):
        if tensor.dtype != tensors[0].dtype or tensor.device != flat.device or not tensor.is_contiguous():
            raise ValueError(
                f"{op}: tensors[{i}] is {tensor.dtype} on {tensor.device}; all must be contiguous {tensors[0].dtype} on "
                f"{flat.device}"
            )
        if offset < 0 or offset + tensor.numel() > flat.numel():
            raise ValueError(
                f"{op}: tensors[{i}] needs [{offset}, {offset + tensor.numel()}) of a flat buffer of {flat.numel()} elements"
            )


def flatten_into_reference(
    tensors: Sequence[Tensor], *, out: Tensor, offsets: Sequence[int], scale: Tensor | None = None
) -> None:
    """The same gather, one tensor at a time."""
    for tensor, offset in zip(tensors, offsets, strict=True):
        cast_copy_reference(tensor.reshape(-1), out=out[offset : offset + tensor.numel()], scale=scale)


def unflatten_from_reference(flat: Tensor, *, tensors: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """The same scatter, one tensor at a time."""
    for tensor, offset in zip(tensors, offsets, strict=True):
        tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))


def _make_inputs(shape: tuple[int, ...], *, dtype: torch.dtype, device: str) -> tuple[list[Tensor], list[int], int]:
    """Tensors of the given sizes, their offsets with a gap between neighbours, and the flat length."""
    tensors = [torch.randn(numel, device=device).to(dtype) for numel in shape]
    offsets, position = [], 0
    for numel in shape:
        offsets.append(position)
        position += -(-numel // 16) * 16 + 16
    return tensors, offsets, position


def _gather_inputs(
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype,
    device: str,
    scaled: bool = False,
    flat_dtype: torch.dtype | None = None,
) -> dict[str, object]:
    tensors, offsets, length = _make_inputs(shape, dtype=dtype, device=device)
    return {
        "tensors": tensors,
        "out": torch.zeros(length, dtype=flat_dtype or dtype, device=device),
        "offsets": offsets,
        "scale": torch.tensor([0.37], device=device) if scaled else None,
    }


def _scatter_inputs(
    shape: tuple[int, ...], *, dtype: torch.dtype, device: str, flat_dtype: torch.dtype | None = None
) -> dict[str, object]:
    tensors, offsets, length = _make_inputs(shape, dtype=dtype, device=device)
    return {
        "flat": torch.randn(length, device=device).to(flat_dtype or dtype),
        "tensors": [torch.zeros_like(t) for t in tensors],
        "offsets": offsets,
    }


AOT_SIZES = (TILE * 64,) * 8


def _aot_case(kernel: object, variant: str, **options: object) -> AotCase:
    return AotCase(
        kernel=kernel,
        shape=AOT_SIZES,
        variant=variant,
        max_barriers=0,
        elements=sum(AOT_SIZES),
        max_instructions_per_element=20,
        **options,
    )


_MIXED = "four 16-bit values beside 16 bytes of float32"
_SMALL = ((1,), (5, 2049, 0, 16), (64, 4096, 8))

SPEC_FLATTEN = OpSpec(
    name="flatten_into",
    op=flatten_into,
    reference=flatten_into_reference,
    make_inputs=_gather_inputs,
    mutated=("out",),
    small_shapes=_SMALL,
    bench_shapes=((1 << 20,) * 500,),
    variants=({}, {"scaled": True, "flat_dtype": torch.float32}),
    num_bytes=lambda shape, itemsize: 2 * sum(shape) * itemsize,
    num_flops=lambda shape: 0,
    aot=(
        _aot_case(_gather, "bf16 to bf16", min_programs=12),
        _aot_case(
            _gather,
            "bf16 to fp32",
            inputs={"scaled": True, "flat_dtype": torch.float32},
            vector_load_bytes=8,
            min_programs=4,
            vector_reason=_MIXED,
        ),
    ),  # fmt: skip
)

SPEC_UNFLATTEN = OpSpec(
    name="unflatten_from",
    op=unflatten_from,
    reference=unflatten_from_reference,
    make_inputs=_scatter_inputs,
    mutated=("tensors",),
    small_shapes=_SMALL,
    bench_shapes=((1 << 20,) * 500,),
    variants=({}, {"flat_dtype": torch.float32}),
    num_bytes=lambda shape, itemsize: 2 * sum(shape) * itemsize,
    num_flops=lambda shape: 0,
    aot=(
        _aot_case(_scatter, "bf16 to bf16", min_programs=12),
        _aot_case(
            _scatter,
            "fp32 to bf16",
            inputs={"flat_dtype": torch.float32},
            vector_store_bytes=8,
            min_programs=4,
            vector_reason=_MIXED,
        ),
    ),
)
