"""Matrix products of tokens with the weights of the experts they were routed to.

    out[s] = x[order[s] // k] @ weight[e(s)]       slots s are sorted by expert (see `moe_routing`)

The gather is part of the product's loads, so no padded or permuted copy of the tokens exists. The grid has as many programs as
are resident at once: each computes the map from tiles to experts from the offsets on the device, once, and takes every n-th tile; then
they write zeros after the last slot. No synchronisation with the host.

On Hopper the copy engine loads a weight's tiles by a descriptor of [E, D, N] (`launch.descriptors`), where the layout has one: a block of one
expert, [1, BLOCK_K, BLOCK_N], has zeros beyond that expert's rows and columns. Gathered rows of x come by pointers.

Backward, without atomics:
    d_slots  = d_out @ weight^T (the same kernel, strides exchanged),  d_x[t] = sum over choices of d_slots[position[t, j]]
    d_weight[e] = sum over its slots of x^T d_out: one program per tile walks the expert's slots in order
FLOPs: 2 S D N forward, 4 S D N backward.

Two weights of one x (gate and up) share d_slots = d_out @ weight^T + d_out2 @ weight2^T: one kernel sums both in float32 and
rounds once. Separate kernels would write and combine slots twice and add the results, 2 S D + 4 T D elements more, and round
before the addition: a token's gradient would then depend on where its slots are added up, here or on another rank.

Tan et al., ScatterMoE, https://arxiv.org/abs/2403.08245
"""

from dataclasses import replace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ztk.kernels.launch.descriptors import ALIGNMENT, Layout, can_describe
from ztk.kernels.launch.functions import OnceFunction
from ztk.kernels.launch.grids import cdiv, next_power_of_2, register_limit
from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.library import needs_reference, register
from ztk.kernels.launch.machine import Architecture, Machine, machine
from ztk.kernels.launch.memory import Memory, empty_matrix, maker, memory_of
from ztk.kernels.ops.moe_combine import combine, random_routing
from ztk.kernels.shared.grouped_tiles import LaunchConfig, sum_of_products
from ztk.kernels.shared.math import cast, dot
from ztk.kernels.shared.spec import FLOAT_DTYPES, OpSpec, compute_dtype

WEIGHTS = (1, 3)  # their places among the tensors of `_grouped_fwd`
REGISTERS = 256  # per thread, of a program of eight warps that is alone on a processor


@jit(do_not_specialize=["S"])
def _grouped_fwd(
    x_ptr, weight, x2_ptr, weight2, out_ptr, order_ptr, offsets_ptr, S, N, D,
    stride_x, stride_e, stride_d, stride_n,
    E: tl.constexpr, BLOCK_E: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIBED: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """out[s] = x[order[s] // TOP_K] @ weight[e], tile after tile of slots of one expert; plus x2 @ weight2, of the same layout

    weight: a pointer; DESCRIBED: a descriptor of blocks [1, BLOCK_K, BLOCK_N], of the weight as stored: TRANSPOSED, [1, BLOCK_N, BLOCK_K].
    """
    o_e = tl.arange(0, BLOCK_E)
    b_first = tl.load(offsets_ptr + o_e, mask=o_e < E, other=0)
    b_size = tl.load(offsets_ptr + o_e + 1, mask=o_e < E, other=0) - b_first
    b_tiles = tl.where(o_e < E, tl.cdiv(b_size, BLOCK_M), 0)
    b_end = tl.cumsum(b_tiles, axis=0)  # the map from tiles to experts: e has those from b_end[e - 1] to b_end[e]
    num_n = tl.cdiv(N, BLOCK_N)
    o_m = tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, BLOCK_K)
    i_program = tl.program_id(0).to(tl.int64)
    for i_p in range(i_program, tl.sum(b_tiles, axis=0) * num_n, tl.num_programs(0)):
        i_tile = (i_p // num_n).to(tl.int32)  # neighbours share their rows of x, and with them the second-level cache
        i_e = tl.sum(tl.where(b_end <= i_tile, 1, 0), axis=0)  # experts that end before this tile
        i_skip = tl.max(tl.where(b_end <= i_tile, b_end, 0), axis=0)
        o_s = tl.load(offsets_ptr + i_e) + (i_tile - i_skip) * BLOCK_M + o_m
        m_s = o_s < tl.load(offsets_ptr + i_e + 1)
        i_n = (i_p % num_n).to(tl.int32) * BLOCK_N
        o_n = i_n + tl.arange(0, BLOCK_N)
        m_n = o_n < N
        b_row = o_s
        if order_ptr is not None:
            b_row = tl.load(order_ptr + o_s, mask=m_s, other=0) // TOP_K
        o_x = b_row.to(tl.int64)[:, None] * stride_x + o_k[None, :]
        o_w = i_e.to(tl.int64) * stride_e + o_k[:, None] * stride_d + o_n[None, :] * stride_n
        b_acc = sum_of_products(
            x_ptr, weight, x2_ptr, weight2, o_x, o_w, i_e, i_n, m_s, m_n, D, stride_d, BLOCK_M, BLOCK_N, BLOCK_K, DESCRIBED, TRANSPOSED
        )  # fmt: skip
        p_out = out_ptr + o_s.to(tl.int64)[:, None] * N + o_n[None, :]
        tl.store(p_out, cast(b_acc, out_ptr.dtype.element_ty), mask=m_s[:, None] & m_n[None, :])
    last = tl.load(offsets_ptr + E)  # rows after the last slot are zero
    b_zero = tl.zeros([BLOCK_M, BLOCK_N], dtype=out_ptr.dtype.element_ty)
    for i_p in range(i_program, tl.cdiv(S - last, BLOCK_M) * num_n, tl.num_programs(0)):
        o_s = last + (i_p // num_n).to(tl.int32) * BLOCK_M + o_m
        o_n = (i_p % num_n).to(tl.int32) * BLOCK_N + tl.arange(0, BLOCK_N)
        p_out = out_ptr + o_s.to(tl.int64)[:, None] * N + o_n[None, :]
        tl.store(p_out, b_zero, mask=(o_s < S)[:, None] & (o_n < N)[None, :])


@jit
def _grouped_bwd_weight(
    x_ptr, d_out_ptr, d_weight_ptr, order_ptr, offsets_ptr, N, D, stride_x,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """d_weight[e] = sum over slots s of e, in order, of x[order[s] // TOP_K]^T d_out[s], one tile [BLOCK_M, BLOCK_N]"""
    i_e = tl.program_id(1).to(tl.int64)
    i_p = tl.program_id(0).to(tl.int64)
    num_n = tl.cdiv(N, BLOCK_N)
    o_d = (i_p // num_n).to(tl.int32) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = (i_p % num_n).to(tl.int32) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_d = o_d < D
    m_n = o_n < N
    first = tl.load(offsets_ptr + i_e)
    last = tl.load(offsets_ptr + i_e + 1)
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for i_s in range(first, last, BLOCK_K):
        o_s = i_s + o_k
        m_s = o_s < last
        b_row = o_s
        if order_ptr is not None:
            b_row = tl.load(order_ptr + o_s, mask=m_s, other=0) // TOP_K
        o_x = b_row.to(tl.int64)[:, None] * stride_x + o_d[None, :]
        b_x = tl.load(x_ptr + o_x, mask=m_s[:, None] & m_d[None, :], other=0.0)
        o_out = o_s.to(tl.int64)[:, None] * N + o_n[None, :]
        b_d_out = tl.load(d_out_ptr + o_out, mask=m_s[:, None] & m_n[None, :], other=0.0)
        b_acc = dot(tl.trans(b_x), b_d_out, b_acc)
    p_d_weight = d_weight_ptr + i_e * D * N + o_d.to(tl.int64)[:, None] * N + o_n[None, :]
    tl.store(p_d_weight, cast(b_acc, d_weight_ptr.dtype.element_ty), mask=m_d[:, None] & m_n[None, :])


@kept
def _product_for(
    target: Machine, bits: int, shape: tuple[int, int, int], strides: tuple[int, int, int], strides_x: tuple[int, int],
    dtype: torch.dtype, top_k: int, transposed: bool, is_aligned: bool,
) -> Bound:  # fmt: skip
    """bits: bit length of S, which changes from step to step where experts are divided over ranks. shape, strides: the stored weight's.
    is_aligned: its address is a multiple of 16, and the second weight's."""
    E, D, N = shape if not transposed else (shape[0], shape[2], shape[1])
    stride_e, *rest = strides
    stride_d, stride_n = rest[::-1] if transposed else rest
    config = LaunchConfig.for_product(itemsize=dtype.itemsize, architecture=target.architecture)
    tiles = (cdiv(1 << bits, config.block_m) + E) * cdiv(N, config.block_n)  # at most
    layouts, programs, limit = {}, config.programs, {}
    if target.architecture is Architecture.hopper:
        if dtype.itemsize == 2 and is_aligned and can_describe(shape, strides=strides, dtype=dtype):
            tile = (config.block_n, config.block_k) if transposed else (config.block_k, config.block_n)
            layouts = dict.fromkeys(WEIGHTS, Layout(shape=shape, strides=strides, block=(1, *tile), dtype=dtype))
        # Rows that Triton cannot load by 16 bytes take an address per element or two: with 128 registers hundreds would be spilled.
        programs = config.programs if dtype.itemsize == 4 or (layouts and not (D % 16 or N % 16)) else 1
        limit = register_limit(REGISTERS // programs, num_warps=config.num_warps, target=target)
    return bind(
        _grouped_fwd, N, D, strides_x[0], stride_e, stride_d, stride_n, grid=(min(tiles, programs * target.processors),),
        layouts=layouts, E=E, BLOCK_E=next_power_of_2(E), TOP_K=top_k, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, DESCRIBED=bool(layouts), TRANSPOSED=transposed, num_warps=config.num_warps,
        num_stages=config.num_stages, enable_fp_fusion=True, **limit,
    )  # fmt: skip


def _launch_fwd(
    x: Tensor, weight: Tensor, x2: Tensor | None, weight2: Tensor | None, offsets: Tensor, order: Tensor | None, top_k: int,
    transposed: bool,
) -> Tensor:  # fmt: skip
    """x @ weight, plus x2 @ weight2 if there are two of each, x2 and weight2 with the strides of the first."""
    address = weight.data_ptr() if weight2 is None else weight.data_ptr() | weight2.data_ptr()
    S, shape = x.shape[0] if order is None else order.numel(), weight.shape
    columns = shape[1 if transposed else 2]
    out = empty_matrix(S, columns=columns, dtype=x.dtype, like=x)
    if S and columns:
        _product_for(
            machine(x.device), S.bit_length(), shape, weight.stride(), x.stride(), x.dtype, top_k, transposed, not address % ALIGNMENT
        ).launch(x, weight, x2, weight2, out, order, offsets, count=S)  # fmt: skip
    return out


@kept
def _weight_gradient_for(
    target: Machine, E: int, D: int, N: int, stride_x: int, x_dtype: torch.dtype, dtype: torch.dtype, top_k: int
) -> tuple[Bound, Memory]:
    config = LaunchConfig.for_product(itemsize=x_dtype.itemsize, architecture=target.architecture)
    bound = bind(
        _grouped_bwd_weight, N, D, stride_x, grid=(cdiv(D, config.block_m) * cdiv(N, config.block_n), E), TOP_K=top_k,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, num_warps=config.num_warps,
        num_stages=config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    return bound, memory_of(E, D, N, dtype=dtype)


def _launch_bwd_weight(
    x: Tensor, d_out: Tensor, offsets: Tensor, order: Tensor | None, top_k: int, dtype: torch.dtype
) -> Tensor:
    product, result = _weight_gradient_for(
        machine(x.device), offsets.numel() - 1, x.shape[1], d_out.shape[1], x.stride(0), x.dtype, dtype, top_k
    )
    d_weight = maker(x)(*result)
    if d_weight.numel():
        product.launch(x, d_out, d_weight, order, offsets)
    return d_weight


def _groups(offsets: Tensor):
    """(expert, slots) of every expert that has any."""
    borders = offsets.tolist()
    return [(e, slice(a, b)) for e, (a, b) in enumerate(zip(borders, borders[1:], strict=False)) if b > a]


def _rows(x: Tensor, *, order: Tensor | None, top_k: int, slots: slice) -> Tensor:
    return x[slots] if order is None else x.index_select(0, order[slots] // top_k)


def _cpu_fwd(
    x: Tensor, weight: Tensor, x2: Tensor | None, weight2: Tensor | None, offsets: Tensor, order: Tensor | None, top_k: int,
    transposed: bool,
) -> Tensor:  # fmt: skip
    if x2 is not None and weight2 is not None:
        # One longer sum, because `addmm` would round the first to 16 bit before it adds the second.
        x, weight = torch.cat((x, x2), dim=1), torch.cat((weight, weight2), dim=2 if transposed else 1)
    weight = weight.mT if transposed else weight
    out = torch.empty(x.shape[0] if order is None else order.numel(), weight.shape[2], dtype=x.dtype)
    out[int(offsets[-1]) :] = 0
    for e, slots in _groups(offsets):
        torch.mm(_rows(x, order=order, top_k=top_k, slots=slots), weight[e], out=out[slots])
    return out


def _cpu_bwd_weight(
    x: Tensor, d_out: Tensor, offsets: Tensor, order: Tensor | None, top_k: int, dtype: torch.dtype
) -> Tensor:
    d_weight = torch.zeros(offsets.numel() - 1, x.shape[1], d_out.shape[1], dtype=dtype)
    for e, slots in _groups(offsets):
        d_weight[e] = _rows(x, order=order, top_k=top_k, slots=slots).T @ d_out[slots]
    return d_weight


_product = register(
    "grouped_matmul(Tensor x, Tensor weight, Tensor? x2, Tensor? weight2, Tensor offsets, Tensor? order, int top_k, bool transposed) -> Tensor",
    triton=_launch_fwd,
    cpu=_cpu_fwd,
    fake=lambda x, weight, x2, weight2, offsets, order, top_k, transposed: x.new_empty(
        x.shape[0] if order is None else order.numel(), weight.shape[1 if transposed else 2]
    ),
)
_weight_gradient = register(
    "grouped_matmul_weight(Tensor x, Tensor d_out, Tensor offsets, Tensor? order, int top_k, ScalarType dtype) -> Tensor",
    triton=_launch_bwd_weight,
    cpu=_cpu_bwd_weight,
    fake=lambda x, d_out, offsets, order, top_k, dtype: x.new_empty(
        offsets.numel() - 1, x.shape[1], d_out.shape[1], dtype=dtype
    ),
)


@register_flop_formula(torch.ops.ztk.grouped_matmul)
def _count_products(x, weight, x2, weight2, *args, out_shape, **kwargs) -> int:
    """For torch's FLOP counter: every row with the weights of its expert, whichever that is."""
    return (1 if weight2 is None else 2) * 2 * out_shape[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.ztk.grouped_matmul_weight)
def _count_weight_products(x, d_out, offsets, order, *args, **kwargs) -> int:
    return 2 * d_out[0] * x[1] * d_out[1]


class _GroupedMatmul(OnceFunction):
    """One product of x per weight."""

    @staticmethod
    def forward(ctx, x, offsets, order, position, *weights):
        ctx.save_for_backward(x, offsets, order, position, *weights)
        ctx.top_k = 1 if position is None else position.shape[1]
        return tuple(_product(x, weight, None, None, offsets, order, ctx.top_k, False) for weight in weights)

    @staticmethod
    def backward(ctx, *d_outs):
        x, offsets, order, position, *weights = ctx.saved_tensors
        d_outs = [d_out.contiguous() for d_out in d_outs]
        d_x = None
        if ctx.needs_input_grad[0]:
            (d_out, d_out2), (weight, weight2) = ((*pair, None)[:2] for pair in (d_outs, weights))
            d_x = _product(d_out, weight, d_out2, weight2, offsets, None, 1, True)
            d_x = d_x if position is None else combine(d_x, None, position)
        d_weights = [
            _weight_gradient(x, d_out, offsets, order, ctx.top_k, weight.dtype) if needed else None
            for d_out, weight, needed in zip(d_outs, weights, ctx.needs_input_grad[4:], strict=True)
        ]
        return d_x, None, None, None, *d_weights


def grouped_matmul(
    x: Tensor, weight: Tensor, *, offsets: Tensor, order: Tensor | None = None, position: Tensor | None = None
) -> Tensor:
    """Multiplies each row of x by its expert's weight. Differentiable in x and weight.

    weight: [E, D, N]; offsets: int32 [E + 1] of slots. Without `order`, x is [S, D] already sorted by expert. With the
    `order` [S] and `position` [T, k] of a `Routing`, x is [T, D] and slot s reads row order[s] // k. Returns [S, N] by slot;
    rows after the last slot, offsets[E], are zero, and so is their gradient.
    """
    _check(x, weight, offsets=offsets, order=order, position=position)
    if needs_reference():
        return grouped_matmul_reference(x, weight, offsets=offsets, order=order, position=position)
    return _GroupedMatmul.apply(x.contiguous(), offsets, order, position, weight.contiguous())[0]


def grouped_matmul_pair(
    x: Tensor,
    weight: Tensor,
    weight2: Tensor,
    *,
    offsets: Tensor,
    order: Tensor | None = None,
    position: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`grouped_matmul` with each of two weights of one shape; x's gradient is summed over both before it is rounded.

    Raises ValueError for weights that differ in shape or dtype, and as `grouped_matmul` does.
    """
    if weight2.shape != weight.shape or weight2.dtype != weight.dtype:
        raise ValueError(
            f"grouped_matmul_pair: weights must be alike, not {tuple(weight.shape)} {weight.dtype} and "
            f"{tuple(weight2.shape)} {weight2.dtype}"
        )
    _check(x, weight, offsets=offsets, order=order, position=position)
    if needs_reference():
        return _pair_reference(x, weight, weight2, offsets=offsets, order=order, position=position)
    return _GroupedMatmul.apply(x.contiguous(), offsets, order, position, weight.contiguous(), weight2.contiguous())


def _check(x: Tensor, weight: Tensor, *, offsets: Tensor, order: Tensor | None, position: Tensor | None) -> None:
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(
            f"grouped_matmul: x {tuple(x.shape)} {x.dtype} must be [rows, D] and weight {tuple(weight.shape)} "
            f"{weight.dtype} [E, D, N] of the same dtype"
        )
    if x.dtype not in FLOAT_DTYPES and not needs_reference():
        raise ValueError(f"grouped_matmul: {x.dtype} is not supported; use float32, float16 or bfloat16")
    if offsets.shape != (weight.shape[0] + 1,) or (order is None) != (position is None):
        raise ValueError(
            f"grouped_matmul: offsets {tuple(offsets.shape)} must be [{weight.shape[0] + 1}], and order and position come "
            "together"
        )


def grouped_matmul_reference(
    x: Tensor, weight: Tensor, *, offsets: Tensor, order: Tensor | None = None, position: Tensor | None = None
) -> Tensor:
    """One product per expert in float32, rounded once."""
    dtype = compute_dtype(x)
    rows = x if order is None or position is None else x.index_select(0, order // position.shape[1])
    *parts, rest = rows.to(dtype).split([*offsets.diff().tolist(), rows.shape[0] - int(offsets[-1])])
    outs = [part @ w for part, w in zip(parts, weight.to(dtype), strict=True)]
    return torch.cat([*outs, rest.new_zeros(rest.shape[0], weight.shape[2])]).to(x.dtype)


def _pair_reference(x: Tensor, weight: Tensor, weight2: Tensor, **where: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both products in float32, rounded once; so is x's gradient."""
    wide = x.to(compute_dtype(x))
    outs = (grouped_matmul_reference(wide, each.to(wide.dtype), **where) for each in (weight, weight2))
    first, second = (out.to(x.dtype) for out in outs)
    return first, second


def _eager_pair(x: Tensor, weight: Tensor, weight2: Tensor, **where: Tensor | None) -> tuple[Tensor, Tensor]:
    return _eager_product(x, weight, **where), _eager_product(x, weight2, **where)


def _eager_product(
    x: Tensor, weight: Tensor, *, offsets: Tensor, order: Tensor | None = None, position: Tensor | None = None
) -> Tensor:
    rows = x if order is None or position is None else x.index_select(0, order // position.shape[1])
    return torch.cat([part @ w for part, w in zip(rows.split(offsets.diff().tolist()), weight, strict=True)])


def _make_inputs(shape, *, dtype, device, gather=True) -> dict[str, Any]:
    T, E, D, N = shape
    k = min(2, E)
    routing = random_routing(T, E=E, k=k, device=device)
    routing.pop("weights")
    if not gather:
        routing |= {"order": None, "position": None}
    x = torch.randn(T if gather else T * k, D, device=device).to(dtype)
    return {"x": x, "weight": (torch.randn(E, D, N, device=device) * D**-0.5).to(dtype), **routing}


def _make_pair_inputs(shape, *, dtype, device, gather=True) -> dict[str, object]:
    inputs = _make_inputs(shape, dtype=dtype, device=device, gather=gather)
    return inputs | {"weight2": torch.randn_like(inputs["weight"].float()).mul_(shape[2] ** -0.5).to(dtype)}


SPEC = OpSpec(
    name="grouped_matmul",
    op=grouped_matmul,
    reference=grouped_matmul_reference,
    eager=_eager_product,
    make_inputs=_make_inputs,
    differentiable=("x", "weight"),
    small_shapes=((1, 1, 16, 8), (21, 3, 17, 33), (70, 5, 40, 24), (70, 4, 17, 70)),
    bench_shapes=((32768, 128, 2048, 768), (16384, 32, 6144, 2048)),
    variants=({}, {"gather": False}),
    num_bytes=lambda shape, itemsize: (
        (shape[0] * (shape[2] + 2 * shape[3]) + shape[1] * shape[2] * shape[3]) * itemsize
    ),
    num_flops=lambda shape: 4 * shape[0] * shape[2] * shape[3],  # two choices per token
    tolerance_ulps=3.0,
)
PAIR_SPEC = replace(
    SPEC,
    name="grouped_matmul_pair",
    op=grouped_matmul_pair,
    reference=_pair_reference,
    eager=_eager_pair,
    make_inputs=_make_pair_inputs,
    differentiable=("x", "weight", "weight2"),
    num_bytes=lambda shape, itemsize: (
        (shape[0] * (shape[2] + 4 * shape[3]) + 2 * shape[1] * shape[2] * shape[3]) * itemsize
    ),
    num_flops=lambda shape: 8 * shape[0] * shape[2] * shape[3],
)
