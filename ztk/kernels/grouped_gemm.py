"""Matrix products of tokens with the weights of the experts they were routed to, and the weighted combine.

    grouped_matmul:  out[s] = x[order[s] // k] @ weight[e(s)]       slots s are sorted by expert (see `moe_routing`)
    moe_combine:     out[t] = sum over choices of w[t, j] * y[position[t, j]]

The gather happens in the load of the product and the combine reads by position, so no padded or permuted copy of the tokens
exists. A program finds its expert from the offsets on the device; the grid is the worst case, ceil(S / BLOCK_M) + E tiles,
and surplus programs return at once: no synchronisation with the host.

Backward, without atomics:
    d_slots  = d_out @ weight^T (the same kernel, strides exchanged),  d_x[t] = sum over choices of d_slots[position[t, j]]
    d_weight[e] = sum over its slots of x^T d_out: one program per tile walks the expert's slots in order
    d_y[s] = w * d_out[t],  d_w[t, j] = <d_out[t], y[s]>: one read of both
FLOPs: 2 S D N forward, 4 S D N backward. Combine reads S N and writes T N elements.

Tan et al., ScatterMoE, https://arxiv.org/abs/2403.08245
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels._dot import dot
from ztk.kernels._library import WARP_SIZE, register, use_reference
from ztk.kernels._machine import TARGETS_OF, Machine, machine
from ztk.kernels._math import cast
from ztk.kernels._spec import FLOAT_DTYPES, AotCase, OpSpec, compute_dtype

COMBINE_WARPS = 4
COMBINE_BLOCK = 8 * WARP_SIZE * COMBINE_WARPS  # eight 16-bit elements per thread: one 16-byte access per choice
MAX_COMBINE_COLUMNS = 16384


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """Tile, reduction step, warps and pipeline stages."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @staticmethod
    def for_product(*, itemsize: int, machine: Machine) -> "LaunchConfig":
        """16-bit: 64 accumulators per thread, and as many stages as shared memory holds (64 KiB on CDNA)."""
        if itemsize == 4:
            return LaunchConfig(block_m=32, block_n=64, block_k=32, num_warps=4, num_stages=1)
        if machine is Machine.cdna:
            return LaunchConfig(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=2)
        return LaunchConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3)


@triton.jit
def _grouped_fwd(
    x_ptr, weight_ptr, out_ptr, order_ptr, offsets_ptr, N, D, stride_x, stride_e, stride_d, stride_n,
    E: tl.constexpr, BLOCK_E: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[s] = x[order[s] // TOP_K] @ weight[e] for one tile of slots of one expert"""
    i_p = tl.program_id(0).to(tl.int64)
    num_n = tl.cdiv(N, BLOCK_N)
    i_tile = i_p // num_n  # neighbours share their rows of x, and with them the second-level cache
    o_e = tl.arange(0, BLOCK_E)
    b_first = tl.load(offsets_ptr + o_e, mask=o_e < E, other=0)
    b_size = tl.load(offsets_ptr + o_e + 1, mask=o_e < E, other=0) - b_first
    b_tiles = tl.where(o_e < E, tl.cdiv(b_size, BLOCK_M), 0)
    i_e = tl.sum(tl.where(tl.cumsum(b_tiles, axis=0) <= i_tile, 1, 0), axis=0)  # experts that end before this tile
    if i_e < E:
        i_skip = tl.sum(tl.where(o_e < i_e, b_tiles, 0), axis=0)
        o_s = tl.load(offsets_ptr + i_e) + ((i_tile - i_skip) * BLOCK_M).to(tl.int32) + tl.arange(0, BLOCK_M)
        m_s = o_s < tl.load(offsets_ptr + i_e + 1)
        o_n = (i_p % num_n).to(tl.int32) * BLOCK_N + tl.arange(0, BLOCK_N)
        o_k = tl.arange(0, BLOCK_K)
        m_n = o_n < N
        b_row = o_s
        if order_ptr is not None:
            b_row = tl.load(order_ptr + o_s, mask=m_s, other=0) // TOP_K
        p_x = x_ptr + b_row.to(tl.int64)[:, None] * stride_x + o_k[None, :]
        p_w = weight_ptr + i_e.to(tl.int64) * stride_e + o_k[:, None] * stride_d + o_n[None, :] * stride_n
        b_acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for i_k in range(0, D, BLOCK_K):
            m_k = i_k + o_k < D
            b_x = tl.load(p_x, mask=m_s[:, None] & m_k[None, :], other=0.0)
            b_w = tl.load(p_w, mask=m_k[:, None] & m_n[None, :], other=0.0)
            b_acc = dot(b_x, b_w, b_acc)
            p_x += BLOCK_K
            p_w += BLOCK_K * stride_d
        p_out = out_ptr + o_s.to(tl.int64)[:, None] * N + o_n[None, :]
        tl.store(p_out, cast(b_acc, out_ptr.dtype.element_ty), mask=m_s[:, None] & m_n[None, :])


@triton.jit
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


@triton.jit
def _combine_fwd(
    y_ptr, weights_ptr, position_ptr, out_ptr, N, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """out[t] = sum over choices, in order, of w[t, j] * y[position[t, j]]; plain sum without weights"""
    i_t = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    b_out = tl.zeros([BLOCK_N], dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        i_s = tl.load(position_ptr + i_t * TOP_K + j).to(tl.int64)
        b_y = tl.load(y_ptr + i_s * N + o_n, mask=m_n, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            b_y *= tl.load(weights_ptr + i_t * TOP_K + j)
        b_out += b_y
    tl.store(out_ptr + i_t * N + o_n, cast(b_out, out_ptr.dtype.element_ty), mask=m_n)


@triton.jit
def _combine_bwd(
    d_out_ptr, y_ptr, weights_ptr, position_ptr, d_y_ptr, d_weights_ptr, N, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """d_y[s] = w * d_out[t] and d_w[t, j] = <d_out[t], y[s]> for the choices of one token"""
    i_t = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BLOCK_N)
    m_n = o_n < N
    b_d_out = tl.load(d_out_ptr + i_t * N + o_n, mask=m_n, other=0.0).to(tl.float32)
    for j in tl.static_range(TOP_K):
        i_s = tl.load(position_ptr + i_t * TOP_K + j).to(tl.int64)
        b_y = tl.load(y_ptr + i_s * N + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_d_y = b_d_out * tl.load(weights_ptr + i_t * TOP_K + j)
        tl.store(d_y_ptr + i_s * N + o_n, cast(b_d_y, d_y_ptr.dtype.element_ty), mask=m_n)
        tl.store(d_weights_ptr + i_t * TOP_K + j, tl.sum(b_d_out * b_y, axis=0))


def _launch_fwd(
    x: Tensor, weight: Tensor, offsets: Tensor, order: Tensor | None, top_k: int, transposed: bool
) -> Tensor:
    E, D, N = weight.shape if not transposed else (weight.shape[0], weight.shape[2], weight.shape[1])
    S = x.shape[0] if order is None else order.numel()
    out = torch.empty(S, N, dtype=x.dtype, device=x.device)
    stride_e, *rest = weight.stride()
    stride_d, stride_n = rest[::-1] if transposed else rest
    if out.numel():
        config = LaunchConfig.for_product(itemsize=x.element_size(), machine=machine(x.device))
        tiles = triton.cdiv(S, config.block_m) + E
        _grouped_fwd[(tiles * triton.cdiv(N, config.block_n),)](
            x, weight, out, order, offsets, N, D, x.stride(0), stride_e, stride_d, stride_n,
            E=E, BLOCK_E=triton.next_power_of_2(E), TOP_K=top_k, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            BLOCK_K=config.block_k, num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def _launch_bwd_weight(
    x: Tensor, d_out: Tensor, offsets: Tensor, order: Tensor | None, top_k: int, dtype: torch.dtype
) -> Tensor:
    E, D, N = offsets.numel() - 1, x.shape[1], d_out.shape[1]
    d_weight = torch.empty(E, D, N, dtype=dtype, device=x.device)
    if d_weight.numel():
        config = LaunchConfig.for_product(itemsize=x.element_size(), machine=machine(x.device))
        tiles = triton.cdiv(D, config.block_m) * triton.cdiv(N, config.block_n)
        _grouped_bwd_weight[(tiles, E)](
            x, d_out, d_weight, order, offsets, N, D, x.stride(0), TOP_K=top_k, BLOCK_M=config.block_m,
            BLOCK_N=config.block_n, BLOCK_K=config.block_k, num_warps=config.num_warps, num_stages=config.num_stages,
            enable_fp_fusion=True,
        )  # fmt: skip
    return d_weight


def _launch_combine(y: Tensor, weights: Tensor | None, position: Tensor) -> Tensor:
    (T, top_k), N = position.shape, y.shape[1]
    out = torch.empty(T, N, dtype=y.dtype, device=y.device)
    if out.numel():
        _combine_fwd[(T, triton.cdiv(N, COMBINE_BLOCK))](
            y,
            weights,
            position,
            out,
            N,
            TOP_K=top_k,
            BLOCK_N=COMBINE_BLOCK,
            num_warps=COMBINE_WARPS,
            enable_fp_fusion=True,
        )
    return out


def _launch_combine_bwd(d_out: Tensor, y: Tensor, weights: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    (T, top_k), N = position.shape, y.shape[1]
    d_y, d_weights = torch.empty_like(y), torch.empty_like(weights)
    if T:
        block = triton.next_power_of_2(N)
        _combine_bwd[(T,)](
            d_out, y, weights, position, d_y, d_weights, N, TOP_K=top_k, BLOCK_N=block,
            num_warps=min(512 // WARP_SIZE, max(1, block // (8 * WARP_SIZE))), enable_fp_fusion=True,
        )  # fmt: skip
    return d_y, d_weights


def _groups(offsets: Tensor):
    """(expert, slots) of every expert that has any."""
    borders = offsets.tolist()
    return [(e, slice(a, b)) for e, (a, b) in enumerate(zip(borders, borders[1:], strict=False)) if b > a]


def _rows(x: Tensor, *, order: Tensor | None, top_k: int, slots: slice) -> Tensor:
    return x[slots] if order is None else x.index_select(0, order[slots] // top_k)


def _cpu_fwd(x: Tensor, weight: Tensor, offsets: Tensor, order: Tensor | None, top_k: int, transposed: bool) -> Tensor:
    weight = weight.mT if transposed else weight
    out = torch.empty(x.shape[0] if order is None else order.numel(), weight.shape[2], dtype=x.dtype)
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


def _cpu_combine(y: Tensor, weights: Tensor | None, position: Tensor) -> Tensor:
    out = torch.zeros(position.shape[0], y.shape[1])
    for j in range(position.shape[1]):
        rows = y.index_select(0, position[:, j]).float()
        out.add_(rows if weights is None else rows.mul_(weights[:, j, None]))
    return out.to(y.dtype)


def _cpu_combine_bwd(d_out: Tensor, y: Tensor, weights: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    d_y, d_weights, wide = torch.empty_like(y), torch.empty_like(weights), d_out.float()
    for j in range(position.shape[1]):
        index = position[:, j].long()
        d_y[index] = (wide * weights[:, j, None]).to(y.dtype)
        d_weights[:, j] = torch.einsum("tn,tn->t", wide, y[index].float())
    return d_y, d_weights


_product = register(
    "grouped_matmul(Tensor x, Tensor weight, Tensor offsets, Tensor? order, int top_k, bool transposed) -> Tensor",
    triton=_launch_fwd,
    cpu=_cpu_fwd,
    fake=lambda x, weight, offsets, order, top_k, transposed: x.new_empty(
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
_combine = register(
    "moe_combine(Tensor y, Tensor? weights, Tensor position) -> Tensor",
    triton=_launch_combine,
    cpu=_cpu_combine,
    fake=lambda y, weights, position: y.new_empty(position.shape[0], y.shape[1]),
)
_combine_backward = register(
    "moe_combine_backward(Tensor d_out, Tensor y, Tensor weights, Tensor position) -> (Tensor, Tensor)",
    triton=_launch_combine_bwd,
    cpu=_cpu_combine_bwd,
    fake=lambda d_out, y, weights, position: (torch.empty_like(y), torch.empty_like(weights)),
)


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, offsets, order, position):
        ctx.save_for_backward(x, weight, offsets, order, position)
        ctx.top_k = 1 if position is None else position.shape[1]
        return _product(x, weight, offsets, order, ctx.top_k, False)

    @staticmethod
    def backward(ctx, d_out):
        x, weight, offsets, order, position = ctx.saved_tensors
        d_out = d_out.contiguous()
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            d_x = _product(d_out, weight, offsets, None, 1, True)
            d_x = d_x if position is None else _combine(d_x, None, position)
        if ctx.needs_input_grad[1]:
            d_weight = _weight_gradient(x, d_out, offsets, order, ctx.top_k, weight.dtype)
        return d_x, d_weight, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, weights, position):
        ctx.save_for_backward(y, weights, position)
        return _combine(y, weights, position)

    @staticmethod
    def backward(ctx, d_out):
        return *_combine_backward(d_out.contiguous(), *ctx.saved_tensors), None


def grouped_matmul(
    x: Tensor, weight: Tensor, *, offsets: Tensor, order: Tensor | None = None, position: Tensor | None = None
) -> Tensor:
    """x's rows times the weight of their expert; gradients for x and weight.

    weight: [E, D, N]; offsets: int32 [E + 1] of slots. Without `order`, x is [S, D] already sorted by expert. With the
    `order` [S] and `position` [T, k] of a `Routing`, x is [T, D] and slot s reads row order[s] // k. Returns [S, N] by slot.
    """
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(
            f"grouped_matmul: x {tuple(x.shape)} {x.dtype} must be [rows, D] and weight {tuple(weight.shape)} "
            f"{weight.dtype} [E, D, N] of the same dtype"
        )
    if x.dtype not in FLOAT_DTYPES and not use_reference():
        raise ValueError(f"grouped_matmul: {x.dtype} is not supported; use float32, float16 or bfloat16")
    if offsets.shape != (weight.shape[0] + 1,) or (order is None) != (position is None):
        raise ValueError(
            f"grouped_matmul: offsets {tuple(offsets.shape)} must be [{weight.shape[0] + 1}], and order and position come "
            "together"
        )
    if use_reference():
        return grouped_matmul_reference(x, weight, offsets=offsets, order=order, position=position)
    return _GroupedMatmul.apply(x.contiguous(), weight.contiguous(), offsets, order, position)


def moe_combine(y: Tensor, *, weights: Tensor, position: Tensor) -> Tensor:
    """Each token's weighted sum of its slots: y [S, N], weights float32 [T, k], position int32 [T, k] -> [T, N].

    Gradients for y and weights. N is at most 16384.
    """
    if y.dim() != 2 or weights.shape != position.shape or y.shape[0] != position.numel():
        raise ValueError(
            f"moe_combine: y {tuple(y.shape)} must be [T * k, N] for weights {tuple(weights.shape)} and position "
            f"{tuple(position.shape)} [T, k]"
        )
    if y.shape[1] > MAX_COMBINE_COLUMNS:
        raise ValueError(f"moe_combine: {y.shape[1]} columns are above {MAX_COMBINE_COLUMNS}")
    if use_reference():
        return moe_combine_reference(y, weights=weights, position=position)
    return _Combine.apply(y.contiguous(), weights.contiguous(), position)


def grouped_matmul_reference(
    x: Tensor, weight: Tensor, *, offsets: Tensor, order: Tensor | None = None, position: Tensor | None = None
) -> Tensor:
    """One product per expert in float32, rounded once."""
    dtype = compute_dtype(x)
    rows = x if order is None else x.index_select(0, order // position.shape[1])
    parts = rows.to(dtype).split(offsets.diff().tolist())
    return torch.cat([part @ w for part, w in zip(parts, weight.to(dtype), strict=True)]).to(x.dtype)


def moe_combine_reference(y: Tensor, *, weights: Tensor, position: Tensor) -> Tensor:
    """sum over choices of weight times row, in float32, rounded once."""
    dtype = compute_dtype(y)
    return torch.einsum("tk,tkn->tn", weights.to(dtype), y.to(dtype)[position]).to(y.dtype)


def _eager_product(
    x: Tensor, weight: Tensor, *, offsets: Tensor, order: Tensor | None = None, position: Tensor | None = None
) -> Tensor:
    rows = x if order is None else x.index_select(0, order // position.shape[1])
    return torch.cat([part @ w for part, w in zip(rows.split(offsets.diff().tolist()), weight, strict=True)])


def _eager_combine(y: Tensor, *, weights: Tensor, position: Tensor) -> Tensor:
    return (weights[:, :, None].to(y.dtype) * y[position]).sum(dim=1)


def _routing(T: int, E: int, k: int, device: str):
    from ztk.kernels.moe_routing import moe_route_reference

    logits = torch.randn(T, E)
    if E > 2:
        logits[:, 1] = -100.0  # an expert without tokens
    routing = moe_route_reference(logits, top_k=k)
    return {name: getattr(routing, name).to(device) for name in ("offsets", "order", "position", "weights")}


def _make_inputs(shape, *, dtype, device, gather=True) -> dict[str, object]:
    T, E, D, N = shape
    k = min(2, E)
    routing = _routing(T, E, k, device)
    routing.pop("weights")
    if not gather:
        routing |= {"order": None, "position": None}
    x = torch.randn(T if gather else T * k, D, device=device).to(dtype)
    return {"x": x, "weight": (torch.randn(E, D, N, device=device) * D**-0.5).to(dtype), **routing}


def _make_combine_inputs(shape, *, dtype, device) -> dict[str, object]:
    T, k, N = shape
    routing = _routing(T, k + 2, k, device)
    y = torch.randn(T * k, N, device=device).to(dtype)
    return {"y": y, "weights": routing["weights"], "position": routing["position"]}


_TYPES = {
    "order_ptr": "*i32", "offsets_ptr": "*i32", "position_ptr": "*i32", "weights_ptr": "*fp32", "d_weights_ptr": "*fp32",
    "N": "i32", "D": "i32", "stride_x": "i64", "stride_e": "i64", "stride_d": "i64",
}  # fmt: skip


def _case(kernel, *, variant: str, constexprs: dict[str, object], **options) -> AotCase:
    names = [name for name in kernel.arg_names if name not in constexprs]
    return AotCase(
        kernel=kernel,
        variant=variant,
        signature={name: _TYPES.get(name, "*bf16") for name in names},
        constexprs=constexprs,
        divisible_by_16=tuple(names),
        **options,
    )


def _product_aot() -> tuple[AotCase, ...]:
    cases = []
    for kind, targets in TARGETS_OF.items():
        config = LaunchConfig.for_product(itemsize=2, machine=kind)
        blocks = {"TOP_K": 8, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
        options = {
            "targets": targets, "num_warps": config.num_warps, "num_stages": config.num_stages,
            "matrix_instructions": True, "vector_store_bytes": 8 if kind is Machine.cdna else 16,
        }  # fmt: skip
        experts = {"E": 128, "BLOCK_E": 128}
        cases += (
            _case(_grouped_fwd, variant="x @ w", constexprs=blocks | experts | {"stride_n": 1}, **options),
            _case(_grouped_bwd_weight, variant="x^T @ d_out", constexprs=blocks, **options),
        )
    return tuple(cases)


SPEC = OpSpec(
    name="grouped_matmul",
    op=grouped_matmul,
    reference=grouped_matmul_reference,
    eager=_eager_product,
    make_inputs=_make_inputs,
    differentiable=("x", "weight"),
    small_shapes=((1, 1, 16, 8), (21, 3, 17, 33), (70, 5, 40, 24)),
    bench_shapes=((32768, 128, 2048, 768), (16384, 32, 6144, 2048)),
    variants=({}, {"gather": False}),
    num_bytes=lambda shape, itemsize: (
        (shape[0] * (shape[2] + 2 * shape[3]) + shape[1] * shape[2] * shape[3]) * itemsize
    ),
    num_flops=lambda shape: 4 * shape[0] * shape[2] * shape[3],  # two choices per token
    aot=_product_aot(),
    tolerance_ulps=3.0,
)
COMBINE_SPEC = OpSpec(
    name="moe_combine",
    op=moe_combine,
    reference=moe_combine_reference,
    eager=_eager_combine,
    make_inputs=_make_combine_inputs,
    differentiable=("y", "weights"),
    small_shapes=((3, 1, 24), (13, 2, 41), (5, 3, 1030)),
    bench_shapes=((32768, 8, 2048),),
    num_bytes=lambda shape, itemsize: shape[0] * (shape[1] + 1) * shape[2] * itemsize,
    num_bytes_backward=lambda shape, itemsize: shape[0] * (2 * shape[1] + 1) * shape[2] * itemsize,
    num_flops=lambda shape: 2 * shape[0] * shape[1] * shape[2],
    aot=(
        _case(
            _combine_fwd, variant="k=8", constexprs={"TOP_K": 8, "BLOCK_N": 1024}, hip_constexprs={"BLOCK_N": 2048},
            num_warps=COMBINE_WARPS, max_registers=64,
        ),
        _case(
            _combine_bwd, variant="k=8,N=2048", constexprs={"TOP_K": 8, "BLOCK_N": 2048},
            hip_constexprs={"BLOCK_N": 4096}, num_warps=8, max_registers=64,
        ),
    ),
    tolerance_ulps=16.0,  # d_weights sums N products: sqrt(1030) roundings of half an eps
)  # fmt: skip
