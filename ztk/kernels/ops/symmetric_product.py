"""Products of a matrix with its own transpose, of which one half is computed and mirrored.

    out = square * x x^T + linear * x        (with linear, x is symmetric)

A program computes a tile on or above the diagonal, and stores it and its transpose. Of a tile on the diagonal it stores the upper triangle
and its mirror image, so out[i, j] and out[j, i] are the same bits. FLOPs: N (N + 1) K in place of 2 N^2 K. Sums are float32, and an
element is rounded once. float32 matrices, and all on a CPU, are multiplied in full by torch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ztk.kernels.launch.descriptors import ALIGNMENT, Layout, can_describe
from ztk.kernels.launch.grids import cdiv
from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.library import register, use_reference
from ztk.kernels.launch.machine import Architecture, Machine, machine
from ztk.kernels.launch.memory import Memory, maker, memory_of
from ztk.kernels.shared.math import cast, dot
from ztk.kernels.shared.spec import OpSpec, compute_dtype

# Side of a tile: warps, and the cost of its multiply-adds. A tile of 64 reads twice as many bytes for each as one of 128.
_TILES = {128: (8, 1.0), 64: (4, 1.5)}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _step(x, first, i_k, N, K, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIBED: tl.constexpr):
    """x[first : first + BLOCK, i_k : i_k + BLOCK_K], zero outside"""
    if DESCRIBED:
        b_x = x.load([first, i_k])
    else:
        o_n, o_k = first + tl.arange(0, BLOCK), i_k + tl.arange(0, BLOCK_K)
        p_x = x + o_n.to(tl.int64)[:, None] * K + o_k[None, :]
        b_x = tl.load(p_x, mask=(o_n < N)[:, None] & (o_k < K)[None, :], other=0.0)
    return b_x


@triton.jit
def _place(i_t):
    """Tile t: its row i and column j. Tiles are numbered by columns, and each column from the top to the diagonal"""
    i_j = ((tl.sqrt(8.0 * i_t.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int64)
    i_j -= (i_j * (i_j + 1) // 2 > i_t).to(tl.int64)  # where the root was rounded
    i_j += ((i_j + 1) * (i_j + 2) // 2 <= i_t).to(tl.int64)
    return i_t - i_j * (i_j + 1) // 2, i_j


@jit
def _symmetric_product(
    x, x_ptr, out_ptr, N, K, square, linear, HAS_LINEAR: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIBED: tl.constexpr
):  # fmt: skip
    """out = square * x x^T + linear * x for tile (i, j), i <= j, and its transpose"""
    i_i, i_j = _place(tl.program_id(0).to(tl.int64))
    first_i, first_j = (i_i * BLOCK).to(tl.int32), (i_j * BLOCK).to(tl.int32)
    b_acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for i_k in range(0, K, BLOCK_K):
        b_i = _step(x, first_i, i_k, N, K, BLOCK, BLOCK_K, DESCRIBED)
        b_j = _step(x, first_j, i_k, N, K, BLOCK, BLOCK_K, DESCRIBED)
        b_acc = dot(b_i, tl.trans(b_j), b_acc)
    b_out = square * b_acc
    o_i, o_j = first_i + tl.arange(0, BLOCK), first_j + tl.arange(0, BLOCK)
    m_out = (o_i < N)[:, None] & (o_j < N)[None, :]
    o_out = o_i.to(tl.int64)[:, None] * N + o_j[None, :]
    if HAS_LINEAR:
        b_out += linear * tl.load(x_ptr + o_out, mask=m_out, other=0.0).to(tl.float32)
    b_out = cast(b_out, out_ptr.dtype.element_ty)
    b_mirrored = tl.trans(b_out)
    m_mirrored = (o_j < N)[:, None] & (o_i < N)[None, :]
    o_mirrored = o_j.to(tl.int64)[:, None] * N + o_i[None, :]
    if i_i == i_j:
        tl.store(out_ptr + o_out, b_out, mask=m_out & (o_i[:, None] <= o_j[None, :]))
        tl.store(out_ptr + o_mirrored, b_mirrored, mask=m_mirrored & (o_i[None, :] < o_j[:, None]))
    else:
        tl.store(out_ptr + o_out, b_out, mask=m_out)
        tl.store(out_ptr + o_mirrored, b_mirrored, mask=m_mirrored)


def _tiles(N: int, *, side: int) -> int:
    """Number of tiles on or above the diagonal."""
    columns = cdiv(N, side)
    return columns * (columns + 1) // 2


def _cost(N: int, *, side: int, target: Machine) -> float:
    """Time of the last processor, in multiply-adds of a tile of 128 per input."""
    return cdiv(_tiles(N, side=side), target.processors) * side * side * _TILES[side][1]


@kept
def _kernel_for(
    target: Machine, N: int, K: int, dtype: torch.dtype, square: float, linear: float, is_aligned: bool
) -> tuple[Bound, Memory]:
    """With the memory of the result."""
    side = min(_TILES, key=lambda side: _cost(N, side=side, target=target))
    block_k, stages = (32, 2) if target.architecture is Architecture.cdna else (64, 4)
    if target.architecture is Architecture.ampere:
        stages = 3  # 96 KiB
    is_described = (
        is_aligned and target.architecture is Architecture.hopper and can_describe((N, K), strides=(K, 1), dtype=dtype)
    )
    layouts = {0: Layout(shape=(N, K), strides=(K, 1), block=(side, block_k), dtype=dtype)} if is_described else {}
    bound = bind(
        _symmetric_product, N, K, square, linear, grid=(_tiles(N, side=side),), layouts=layouts, HAS_LINEAR=linear != 0, BLOCK=side,
        BLOCK_K=block_k, DESCRIBED=is_described, num_warps=_TILES[side][0], num_stages=stages, enable_fp_fusion=True,
    )  # fmt: skip
    return bound, memory_of(N, N, dtype=dtype)


def _launch(x: Tensor, square: float, linear: float) -> Tensor:
    if x.dtype == torch.float32 or not x.numel():
        return _plain(x, square, linear)
    x = x if x.stride(1) == 1 and x.stride(0) == x.shape[1] else x.contiguous()
    is_aligned = x.data_ptr() % ALIGNMENT == 0
    bound, memory = _kernel_for(machine(x.device), *x.shape, x.dtype, square, linear, is_aligned)
    out = maker(x)(*memory)
    bound.launch(x, x if linear else None, out)
    return out


def _plain(x: Tensor, square: float, linear: float) -> Tensor:
    if linear:
        return torch.addmm(x, x, x, beta=linear, alpha=square)
    return x @ x.T if square == 1 else (x @ x.T) * square


_op = register(
    "symmetric_product(Tensor x, float square, float linear) -> Tensor",
    triton=_launch,
    cpu=_plain,
    fake=lambda x, square, linear: x.new_empty(x.shape[0], x.shape[0]),
)


@register_flop_formula(torch.ops.ztk.symmetric_product)
def _flops(x: tuple[int, ...], *_, **__) -> int:
    """Of the full product, as torch counts it."""
    return 2 * x[0] * x[0] * x[1]


def symmetric_product(x: Tensor, *, square: float = 1.0, linear: float = 0.0) -> Tensor:
    """Returns square * x x^T + linear * x, [N, N] in the dtype of `x`; no gradient.

    x: [N, K], bfloat16, float16 or float32. With `linear`, x is symmetric [N, N], which is not checked. On a GPU the result of 16-bit
    matrices is equal to its transpose, bit for bit. Raises ValueError for other shapes and dtypes.
    """
    if x.dim() != 2 or x.dtype not in _DTYPES or (linear and x.shape[0] != x.shape[1]):
        raise ValueError(
            f"symmetric_product: x is {tuple(x.shape)} {x.dtype}; pass bfloat16, float16 or float32 [N, K], and [N, N] with linear"
        )
    return _reference(x, square=square, linear=linear) if use_reference() else _op(x, square, linear)


def _reference(x: Tensor, *, square: float = 1.0, linear: float = 0.0) -> Tensor:
    """The same in plain torch, float32 inside."""
    wide = x.to(compute_dtype(x))
    return (square * (wide @ wide.T) + linear * wide if linear else square * (wide @ wide.T)).to(x.dtype)


def _eager(x: Tensor, *, square: float = 1.0, linear: float = 0.0) -> Tensor:
    return square * (x @ x.T) + linear * x if linear else square * (x @ x.T)


def _make_inputs(shape: tuple[int, ...], *, dtype: torch.dtype, device: str, polynomial: bool = False) -> dict:
    x = torch.randn(shape[0] if polynomial else shape[1], shape[0], device=device).T
    if not polynomial:
        return {"x": x.contiguous().to(dtype)}
    return {"x": ((x + x.T) * 0.1).to(dtype).contiguous(), "square": 2.0315, "linear": -4.775}


SPEC = OpSpec(
    name="symmetric_product",
    op=symmetric_product,
    reference=_reference,
    eager=_eager,
    make_inputs=_make_inputs,
    dtypes=_DTYPES,
    interpreted_dtypes=(torch.float16, torch.bfloat16),
    small_shapes=((1, 1), (40, 72), (150, 70)),
    bench_shapes=((2048, 8192), (4096, 4096), (4096, 14336)),
    variants=({}, {"polynomial": True}),
    num_bytes=lambda shape, itemsize: (shape[0] * shape[1] + shape[0] * shape[0]) * itemsize,
    num_flops=lambda shape: shape[0] * (shape[0] + 1) * shape[1],
)
