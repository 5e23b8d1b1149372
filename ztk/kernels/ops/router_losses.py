"""The losses of a router over E experts: how evenly it spreads tokens, and how large its logits are.

    f       = counts / sum(counts)                                      the share of all choices that fell on each expert
    p_t     = softmax(x_t),   s_t = sum_e f_e p_te,   lse_t = log(sum_e exp(x_te))
    balance = E * mean over tokens of s_t
    z       = mean over tokens of lse_t^2
    d_x_te  = p_te * (d_balance * E * (f_e - s_t) + d_z * 2 * lse_t) / T

Forward reads the logits once and keeps two numbers per token, which a second kernel of one program adds up in a fixed order. Backward
reads the logits again and writes as many: 12 bytes per float32 logit in all. The counts have no gradient.

Fedus et al., https://arxiv.org/abs/2101.03961; Zoph et al., https://arxiv.org/abs/2202.08906
"""

import torch
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.functions import OnceFunction
from ztk.kernels.launch.grids import cdiv, next_power_of_2
from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.library import needs_reference, register
from ztk.kernels.launch.memory import Memory, maker, memory_of
from ztk.kernels.shared.spec import OpSpec, compute_dtype

TILE = 4096  # logits of a program: 32 in each of its threads
NUM_WARPS = 4
SUMMED = 1024  # tokens that the adding program reads at once


@jit
def _router_statistics(
    logits_ptr, counts_ptr, statistics_ptr, T, E, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    """s and lse of BLOCK_T tokens"""
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_e = tl.arange(0, BLOCK_E)
    m_t = o_t < T
    m_e = o_e < E
    b_counts = tl.load(counts_ptr + o_e, mask=m_e, other=0.0)
    b_f = b_counts / tl.maximum(tl.sum(b_counts, axis=0), 1.0)
    m = m_t[:, None] & m_e[None, :]
    b_x = tl.load(logits_ptr + o_t[:, None] * E + o_e[None, :], mask=m, other=float("-inf"))
    b_max = tl.where(m_t, tl.max(b_x, axis=1), 0.0)
    b_exp = tl.exp(b_x - b_max[:, None])
    b_sum = tl.where(m_t, tl.sum(b_exp, axis=1), 1.0)
    tl.store(statistics_ptr + o_t, tl.sum(b_exp * b_f[None, :], axis=1) / b_sum, mask=m_t)
    tl.store(statistics_ptr + T + o_t, b_max + tl.log(b_sum), mask=m_t)


@jit
def _router_means(statistics_ptr, out_ptr, T, E, BLOCK: tl.constexpr):
    """balance and z; one program, so that the sums have one order"""
    b_s = tl.zeros([BLOCK], dtype=tl.float32)
    b_z = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, T, BLOCK):
        o_t = start + tl.arange(0, BLOCK)
        m_t = o_t < T
        b_s += tl.load(statistics_ptr + o_t, mask=m_t, other=0.0)
        b_lse = tl.load(statistics_ptr + T + o_t, mask=m_t, other=0.0)
        b_z += b_lse * b_lse
    tl.store(out_ptr, tl.sum(b_s, axis=0) * E / T)
    tl.store(out_ptr + 1, tl.sum(b_z, axis=0) / T)


@jit
def _router_losses_bwd(
    d_ptr, logits_ptr, counts_ptr, statistics_ptr, d_logits_ptr, T, E, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    """d_x of BLOCK_T tokens"""
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_e = tl.arange(0, BLOCK_E)
    m_t = o_t < T
    m_e = o_e < E
    d_balance = tl.load(d_ptr) * E / T
    d_z = tl.load(d_ptr + 1) * 2.0 / T
    b_counts = tl.load(counts_ptr + o_e, mask=m_e, other=0.0)
    b_f = b_counts / tl.maximum(tl.sum(b_counts, axis=0), 1.0)
    m = m_t[:, None] & m_e[None, :]
    p = o_t[:, None] * E + o_e[None, :]
    b_x = tl.load(logits_ptr + p, mask=m, other=0.0)
    b_s = tl.load(statistics_ptr + o_t, mask=m_t, other=0.0)
    b_lse = tl.load(statistics_ptr + T + o_t, mask=m_t, other=0.0)
    b_slope = d_balance * (b_f[None, :] - b_s[:, None]) + (d_z * b_lse)[:, None]
    tl.store(d_logits_ptr + p, tl.exp(b_x - b_lse[:, None]) * b_slope, mask=m)


def _tile(E: int) -> tuple[int, int]:
    """Tokens and experts of a program."""
    block_e = next_power_of_2(E)
    return max(1, TILE // block_e), block_e


@kept
def _forward_for(T: int, E: int) -> tuple[Bound, Bound, Memory, Memory]:
    """The statistics and their means, with the memory of losses and statistics."""
    block_t, block_e = _tile(E)
    statistics = bind(
        _router_statistics, T, E, grid=(cdiv(T, block_t),), BLOCK_T=block_t, BLOCK_E=block_e, num_warps=NUM_WARPS, enable_fp_fusion=True
    )  # fmt: skip
    means = bind(_router_means, T, E, grid=(1,), BLOCK=SUMMED, num_warps=8, enable_fp_fusion=True)
    return statistics, means, memory_of(2, dtype=torch.float32), memory_of(2, T, dtype=torch.float32)


def _launch_fwd(logits: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    T, E = logits.shape
    per_token, means, two, two_rows = _forward_for(T, E)
    make = maker(logits)
    losses, statistics = make(*two), make(*two_rows)
    per_token.launch(logits, counts, statistics)
    means.launch(statistics, losses)
    return losses, statistics


@kept
def _backward_for(T: int, E: int, dtype: torch.dtype) -> tuple[Bound, Memory]:
    """Returns the kernel and the memory of the logits' gradient. dtype: dtype of the logits."""
    block_t, block_e = _tile(E)
    bound = bind(
        _router_losses_bwd, T, E, grid=(cdiv(T, block_t),), BLOCK_T=block_t, BLOCK_E=block_e, num_warps=NUM_WARPS, enable_fp_fusion=True
    )  # fmt: skip
    return bound, memory_of(T, E, dtype=dtype)


def _launch_bwd(d_losses: Tensor, logits: Tensor, counts: Tensor, statistics: Tensor) -> Tensor:
    T, E = logits.shape
    backward, like_logits = _backward_for(T, E, logits.dtype)
    d_logits = maker(logits)(*like_logits)
    backward.launch(d_losses, logits, counts, statistics, d_logits)
    return d_logits


def _cpu_fwd(logits: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    share = counts / counts.sum().clamp_min(1)
    statistics = torch.stack([logits.softmax(dim=1) @ share, logits.logsumexp(dim=1)])
    losses = torch.stack([logits.shape[1] * statistics[0].mean(), statistics[1].square().mean()])
    return losses, statistics


def _cpu_bwd(d_losses: Tensor, logits: Tensor, counts: Tensor, statistics: Tensor) -> Tensor:
    T, E = logits.shape
    share = counts / counts.sum().clamp_min(1)
    s, lse = statistics
    slope = (share - s[:, None]).mul_(d_losses[0] * (E / T)).add_((d_losses[1] * (2 / T) * lse)[:, None])
    return slope.mul_((logits - lse[:, None]).exp_())


_forward = register(
    "router_losses(Tensor logits, Tensor counts) -> (Tensor, Tensor)",
    triton=_launch_fwd,
    cpu=_cpu_fwd,
    fake=lambda logits, counts: (logits.new_empty(2), logits.new_empty(2, logits.shape[0])),
)
_backward = register(
    "router_losses_backward(Tensor d_losses, Tensor logits, Tensor counts, Tensor statistics) -> Tensor",
    triton=_launch_bwd,
    cpu=_cpu_bwd,
    fake=lambda d_losses, logits, counts, statistics: torch.empty_like(logits),
)


class _RouterLosses(OnceFunction):
    @staticmethod
    def forward(ctx, logits: Tensor, counts: Tensor) -> Tensor:
        losses, statistics = _forward(logits, counts)
        ctx.save_for_backward(logits, counts, statistics)
        return losses

    @staticmethod
    def backward(ctx, d_losses: Tensor) -> tuple[Tensor, None]:
        return _backward(d_losses.contiguous(), *ctx.saved_tensors), None


def router_losses(logits: Tensor, *, counts: Tensor) -> Tensor:
    """[balance, z], float32 [2], differentiable in the logits.

    logits: float32 [T, E], T and E at least 1. counts: [E] of any dtype, choices per expert of all tokens that are balanced together; no
    negative ones.
    Raises ValueError for other shapes and for logits of another dtype.
    """
    if logits.dim() != 2 or 0 in logits.shape or logits.dtype != torch.float32 or counts.shape != logits.shape[1:]:
        raise ValueError(
            f"router_losses: logits {tuple(logits.shape)} {logits.dtype} and counts {tuple(counts.shape)} must be float32 [T, E] and [E]"
        )
    if needs_reference():
        return router_losses_reference(logits, counts=counts)
    return _RouterLosses.apply(logits.contiguous(), counts.to(torch.float32).contiguous())


def router_losses_reference(logits: Tensor, *, counts: Tensor) -> Tensor:
    """The same in plain torch."""
    x = logits.to(compute_dtype(logits))
    share = counts.to(x.dtype) / counts.sum().clamp_min(1)
    balance = x.shape[1] * (share * x.softmax(dim=1).mean(dim=0)).sum()
    return torch.stack([balance, x.logsumexp(dim=1).square().mean()])


def _make_inputs(shape: tuple[int, ...], *, dtype: torch.dtype, device: str, empty: bool = False) -> dict[str, object]:
    counts = torch.zeros(shape[1], dtype=torch.int32) if empty else torch.randint(0, 9, (shape[1],), dtype=torch.int32)
    return {"logits": (2 * torch.randn(shape, device=device)).to(dtype), "counts": counts.to(device)}


SPEC = OpSpec(
    name="router_losses",
    op=router_losses,
    reference=router_losses_reference,
    make_inputs=_make_inputs,
    differentiable=("logits",),
    small_shapes=((1, 2), (5, 8), (37, 40)),
    bench_shapes=((32768, 128),),
    variants=({}, {"empty": True}),
    num_bytes=lambda shape, itemsize: 4 * shape[0] * shape[1],
    num_bytes_backward=lambda shape, itemsize: 8 * shape[0] * shape[1],
    num_flops=lambda shape: 8 * shape[0] * shape[1],
    dtypes=(torch.float32,),
    interpreted_dtypes=(torch.float32,),
)  # fmt: skip
