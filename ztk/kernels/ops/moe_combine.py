"""Each token's weighted sum of its experts' outputs, by position: no atomics, no scatter.

    out[t] = sum over choices j, in order, of w[t, j] * y[position[t, j]]
    d_y[s] = w * d_out[t],   d_w[t, j] = <d_out[t], y[s]>

Forward reads T k N and writes T N elements. Backward reads d_out and y once and writes d_y: T N (2 k + 1). Without weights it
is the plain sum that turns a gradient by slot into a gradient by token (see `grouped_gemm`). Positions come from
`moe_routing`.
"""

import torch
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.dependent import dependent_launch, wait_for_kernels
from ztk.kernels.launch.functions import OnceFunction
from ztk.kernels.launch.grids import cdiv, next_power_of_2
from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.library import needs_reference, register
from ztk.kernels.launch.machine import Machine, machine
from ztk.kernels.launch.memory import empty_matrix
from ztk.kernels.ops.moe_routing import moe_route_reference
from ztk.kernels.shared.math import cast
from ztk.kernels.shared.spec import OpSpec, compute_dtype

COMBINE_WARPS = 4
PER_THREAD = 8  # 16-bit elements: one 16-byte access per choice
MAX_THREADS = 512
MAX_COMBINE_COLUMNS = 16384


@jit
def _combine_fwd(
    y_ptr, weights_ptr, position_ptr, out_ptr, N, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """out[t] = sum over choices, in order, of w[t, j] * y[position[t, j]]; plain sum without weights"""
    wait_for_kernels(PDL)
    i_t = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    b_out = tl.zeros([BLOCK_N], dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        i_s = tl.load(position_ptr + i_t * TOP_K + j).to(tl.int64)
        b_y = tl.load(y_ptr + i_s * N + o_n, mask=o_n < tl.where(i_s < 0, 0, N), other=0.0).to(tl.float32)
        if weights_ptr is not None:
            b_y *= tl.load(weights_ptr + i_t * TOP_K + j)
        b_out += b_y
    tl.store(out_ptr + i_t * N + o_n, cast(b_out, out_ptr.dtype.element_ty), mask=m_n)


@jit
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
        m_s = o_n < tl.where(i_s < 0, 0, N)  # nothing of a choice that was dropped
        b_y = tl.load(y_ptr + i_s * N + o_n, mask=m_s, other=0.0).to(tl.float32)
        b_d_y = b_d_out * tl.load(weights_ptr + i_t * TOP_K + j)
        tl.store(d_y_ptr + i_s * N + o_n, cast(b_d_y, d_y_ptr.dtype.element_ty), mask=m_s)
        tl.store(d_weights_ptr + i_t * TOP_K + j, tl.sum(b_d_out * b_y, axis=0))


@kept
def _forward_for(target: Machine, T: int, N: int, top_k: int) -> Bound:
    block = PER_THREAD * target.warp_size * COMBINE_WARPS
    return bind(
        _combine_fwd, N, grid=(T, cdiv(N, block)), TOP_K=top_k, BLOCK_N=block, num_warps=COMBINE_WARPS, enable_fp_fusion=True,
        **dependent_launch(target),
    )  # fmt: skip


@kept
def _backward_for(target: Machine, T: int, N: int, top_k: int) -> Bound:
    block, warp_size = next_power_of_2(N), target.warp_size
    return bind(
        _combine_bwd, N, grid=(T,), TOP_K=top_k, BLOCK_N=block,
        num_warps=min(MAX_THREADS, max(warp_size, block // PER_THREAD)) // warp_size, enable_fp_fusion=True,
    )  # fmt: skip


def _launch_combine(y: Tensor, weights: Tensor | None, position: Tensor) -> Tensor:
    (T, top_k), N = position.shape, y.shape[1]
    out = empty_matrix(T, columns=N, dtype=y.dtype, like=y)
    if out.numel():
        _forward_for(machine(y.device), T, N, top_k).launch(y, weights, position, out)
    return out


def _launch_combine_bwd(
    d_out: Tensor, y: Tensor, weights: Tensor, position: Tensor, dropped: bool
) -> tuple[Tensor, Tensor]:
    (T, top_k), N = position.shape, y.shape[1]
    d_y, d_weights = torch.zeros_like(y) if dropped else torch.empty_like(y), torch.empty_like(weights)
    if T:
        _backward_for(machine(y.device), T, N, top_k).launch(d_out, y, weights, position, d_y, d_weights)
    return d_y, d_weights


def _cpu_combine(y: Tensor, weights: Tensor | None, position: Tensor) -> Tensor:
    out = torch.zeros(position.shape[0], y.shape[1])
    for j in range(position.shape[1]):
        slot = position[:, j]
        rows = y.index_select(0, slot.clamp_min(0)).float()
        if weights is not None:
            rows.mul_(weights[:, j, None])
        out.add_(rows.masked_fill_((slot < 0)[:, None], 0.0))
    return out.to(y.dtype)


def _cpu_combine_bwd(
    d_out: Tensor, y: Tensor, weights: Tensor, position: Tensor, dropped: bool
) -> tuple[Tensor, Tensor]:
    d_y, d_weights = torch.zeros_like(y) if dropped else torch.empty_like(y), torch.empty_like(weights)
    wide = d_out.float()
    for j in range(position.shape[1]):
        taken = position[:, j] >= 0
        index = position[taken, j].long()
        d_y[index] = (wide[taken] * weights[taken, j, None]).to(y.dtype)
        d_weights[:, j] = 0.0
        d_weights[taken, j] = torch.einsum("tn,tn->t", wide[taken], y[index].float())
    return d_y, d_weights


combine = register(
    "moe_combine(Tensor y, Tensor? weights, Tensor position) -> Tensor",
    triton=_launch_combine,
    cpu=_cpu_combine,
    fake=lambda y, weights, position: y.new_empty(position.shape[0], y.shape[1]),
)
_combine_backward = register(
    "moe_combine_backward(Tensor d_out, Tensor y, Tensor weights, Tensor position, bool dropped) -> (Tensor, Tensor)",
    triton=_launch_combine_bwd,
    cpu=_cpu_combine_bwd,
    fake=lambda d_out, y, weights, position, dropped: (torch.empty_like(y), torch.empty_like(weights)),
)


class _Combine(OnceFunction):
    @staticmethod
    def forward(ctx, y, weights, position, dropped):
        ctx.save_for_backward(y, weights, position)
        ctx.dropped = dropped
        return combine(y, weights, position)

    @staticmethod
    def backward(ctx, d_out):
        return *_combine_backward(d_out.contiguous(), *ctx.saved_tensors, ctx.dropped), None, None


def moe_combine(y: Tensor, *, weights: Tensor, position: Tensor, dropped: bool = False) -> Tensor:
    """Each token's weighted sum of its slots: y [S, N], weights float32 [T, k], position int32 [T, k] -> [T, N].

    Gradients for y and weights. N is at most 16384. A position of -1 (see `moe_slots`) adds nothing. Set `dropped` if there may be
    any, or if y has more rows than there are positions: unused slots then get a gradient of zero.
    Raises ValueError for other shapes.
    """
    if y.dim() != 2 or weights.shape != position.shape or (y.shape[0] != position.numel() and not dropped):
        raise ValueError(
            f"moe_combine: y {tuple(y.shape)} must be [T * k, N] for weights {tuple(weights.shape)} and position "
            f"{tuple(position.shape)} [T, k]"
        )
    if y.shape[1] > MAX_COMBINE_COLUMNS:
        raise ValueError(f"moe_combine: {y.shape[1]} columns are above {MAX_COMBINE_COLUMNS}")
    if needs_reference():
        return moe_combine_reference(y, weights=weights, position=position)
    return _Combine.apply(y.contiguous(), weights.contiguous(), position, dropped)


def moe_combine_reference(y: Tensor, *, weights: Tensor, position: Tensor, dropped: bool = False) -> Tensor:
    """sum over choices of weight times row, in float32, rounded once."""
    dtype = compute_dtype(y)
    kept = weights.to(dtype) * (position >= 0)
    return torch.einsum("tk,tkn->tn", kept, y.to(dtype)[position.clamp_min(0)]).to(y.dtype)


def _eager(y: Tensor, *, weights: Tensor, position: Tensor) -> Tensor:
    return (weights[:, :, None].to(y.dtype) * y[position]).sum(dim=1)


def random_routing(T: int, *, E: int, k: int, device: str) -> dict[str, Tensor]:
    """A routing of T random tokens, one expert left without any: offsets [E + 1], order [T * k], position and weights [T, k]."""
    logits = torch.randn(T, E)
    if E > 2:
        logits[:, 1] = -100.0  # an expert without tokens
    routing = moe_route_reference(logits, top_k=k)
    return {name: getattr(routing, name).to(device) for name in ("offsets", "order", "position", "weights")}


def _make_inputs(shape, *, dtype, device) -> dict[str, object]:
    T, k, N = shape
    routing = random_routing(T, E=k + 2, k=k, device=device)
    y = torch.randn(T * k, N, device=device).to(dtype)
    return {"y": y, "weights": routing["weights"], "position": routing["position"]}


SPEC = OpSpec(
    name="moe_combine",
    op=moe_combine,
    reference=moe_combine_reference,
    eager=_eager,
    make_inputs=_make_inputs,
    differentiable=("y", "weights"),
    small_shapes=((3, 1, 24), (13, 2, 41), (5, 3, 1030)),
    bench_shapes=((32768, 8, 2048),),
    num_bytes=lambda shape, itemsize: shape[0] * (shape[1] + 1) * shape[2] * itemsize,
    num_bytes_backward=lambda shape, itemsize: shape[0] * (2 * shape[1] + 1) * shape[2] * itemsize,
    num_flops=lambda shape: 2 * shape[0] * shape[1] * shape[2],
    tolerance_ulps=16.0,  # d_weights sums N products: sqrt(1030) roundings of half an eps
)  # fmt: skip
