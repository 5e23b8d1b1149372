"""Mean cross entropy of logits whose columns are divided over ranks, with ignored targets and z-loss.

    m_r, s_r = max(x_r), sum(exp(x_r - m_r))               of the columns x_r of rank r
    m, s     = max over r of m_r, sum over r of s_r * exp(m_r - m)
    lse      = m + log(s)
    loss     = mean over targets that count of  lse - x[target] + z * lse^2
    d_x_r    = (exp(x_r - m) * (1 + 2 * z * lse) / s - onehot(target)) * d_loss / number of targets

Three kernels: each rank reads its logits once for m_r, s_r and the target's logit (zero where another rank has that column), which
the ranks exchange, three numbers per row; one program joins them to the loss; backward reads the logits again and writes their gradient
over them. 6 bytes per 16-bit logit move in all. No host synchronisation, no sum whose order could change.

The gradient takes m and s in place of lse: a float32 of 4 to 8 has an error of up to 2 eps, which exp(x - lse) makes a relative one, and
a GPU's log2 adds up to 2 eps times log2(s). The largest logits weigh most and have the smallest x - m, so their exponential is nearly exact.

Shoeybi et al., Megatron-LM, https://arxiv.org/abs/1909.08053; z-loss: https://arxiv.org/abs/2204.02311
"""

from collections.abc import Callable

import torch
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.functions import OnceFunction
from ztk.kernels.launch.grids import cdiv
from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.library import needs_reference, register
from ztk.kernels.launch.machine import Machine, machine
from ztk.kernels.launch.memory import Memory, maker, memory_of
from ztk.kernels.ops.cross_entropy import sum_of_row
from ztk.kernels.shared.logit_tiles import LaunchConfig
from ztk.kernels.shared.math import cast
from ztk.kernels.shared.spec import OpSpec, compute_dtype

Exchange = Callable[[Tensor], Tensor]  # float32 [3, M] of this rank -> [ranks, 3, M], in rank order
JOINED_ROWS = 1024  # that the joining program reads at once
CPU_CHUNK = 1 << 22  # logits in float32 at one time: 16 MB

LOWEST, HIGHEST = (
    -1e30,
    3e38,
)  # of a maximum on a CPU, as in the kernels; finite: differences of maxima stay free of NaN

_LOWEST = tl.constexpr(LOWEST)
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@jit
def _sharded_statistics(
    logits_ptr, target_ptr, statistics_ptr, M, V, first, ignore_index,
    CHUNKS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """maximum and sum of one row's own columns, and the target's logit if it is one of them"""
    i_m = tl.program_id(0).to(tl.int64)
    p_x = logits_ptr + i_m * V
    target = tl.load(target_ptr + i_m)
    column = target - first
    is_here = (target != ignore_index) & (column >= 0) & (column < V)
    x_target = tl.load(p_x + column, mask=is_here, other=0.0).to(tl.float32)
    peak, total, _ = sum_of_row(p_x, V, False, False, CHUNKS, LANES, VECTOR)
    tl.store(statistics_ptr + i_m, peak)
    tl.store(statistics_ptr + M + i_m, total)
    tl.store(statistics_ptr + 2 * M + i_m, x_target)


@jit
def _sharded_join(
    statistics_ptr, target_ptr, row_ptr, mean_ptr, M, ranks, ignore_index, z_loss, BLOCK: tl.constexpr
):  # fmt: skip
    """row_ptr [2, M]: the maximum, and the factor of exp(x - maximum) in the gradient; mean_ptr: the mean loss, and 1 / number of targets.
    One program, so that the sum has one order"""
    b_loss = tl.zeros([BLOCK], dtype=tl.float32)
    b_count = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        o_m = start + tl.arange(0, BLOCK)
        m_m = o_m < M
        b_max = tl.full([BLOCK], _LOWEST, dtype=tl.float32)
        p_rank = statistics_ptr + o_m
        for _ in range(0, ranks):
            b_max = tl.maximum(b_max, tl.load(p_rank, mask=m_m, other=_LOWEST))
            p_rank += 3 * M
        b_sum = tl.zeros([BLOCK], dtype=tl.float32)
        b_target = tl.zeros([BLOCK], dtype=tl.float32)
        p_rank = statistics_ptr + o_m
        for _ in range(0, ranks):
            b_scale = tl.exp2((tl.load(p_rank, mask=m_m, other=_LOWEST) - b_max) * _LOG2E)
            b_sum += tl.load(p_rank + M, mask=m_m, other=1.0) * b_scale
            b_target += tl.load(p_rank + 2 * M, mask=m_m, other=0.0)
            p_rank += 3 * M
        b_lse = b_max + tl.log2(b_sum) * _LN2
        tl.store(row_ptr + o_m, b_max, mask=m_m)
        tl.store(row_ptr + M + o_m, tl.div_rn(1.0 + 2.0 * z_loss * b_lse, b_sum), mask=m_m)
        b_counts = m_m & (tl.load(target_ptr + o_m, mask=m_m, other=ignore_index) != ignore_index)
        b_loss += tl.where(b_counts, b_lse - b_target + z_loss * b_lse * b_lse, 0.0)
        b_count += tl.where(b_counts, 1.0, 0.0)
    count = tl.maximum(tl.sum(b_count, axis=0), 1.0)
    tl.store(mean_ptr, tl.sum(b_loss, axis=0) / count)
    tl.store(mean_ptr + 1, 1.0 / count)


@jit
def _sharded_backward(
    logits_ptr, target_ptr, row_ptr, d_loss_ptr, mean_ptr, M, V, first, ignore_index, BLOCK: tl.constexpr
):  # fmt: skip
    """d_x over x, of one tile of one row"""
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    i_m = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1).to(tl.int64) * BLOCK
    o_n = tl.arange(0, BLOCK)  # of this tile: 32 bits
    m_n = o_n < V - start
    p_x = logits_ptr + i_m * V + start
    target = tl.load(target_ptr + i_m)
    if target != ignore_index:
        column = target - first
        is_here = (column >= 0) & (column < V)
        column = tl.where(is_here & (column >= start) & (column < start + BLOCK), column - start, -1).to(tl.int32)
        peak = tl.load(row_ptr + i_m)
        weight = tl.load(d_loss_ptr) * tl.load(mean_ptr + 1)
        scale = weight * tl.load(row_ptr + M + i_m)
        b_x = tl.load(p_x + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_grad = tl.exp2((b_x - peak) * _LOG2E) * scale - tl.where(o_n == column, weight, 0.0)
        tl.store(p_x + o_n, cast(b_grad, dtype), mask=m_n)
    else:
        tl.store(p_x + o_n, tl.zeros([BLOCK], dtype=dtype), mask=m_n)


@kept
def _statistics_for(
    target: Machine, M: int, V: int, itemsize: int, first: int, ignore_index: int
) -> tuple[Bound, Memory]:
    """With the memory of the statistics."""
    config = LaunchConfig.for_row(V, itemsize=itemsize, warp_size=target.warp_size)
    bound = bind(
        _sharded_statistics, M, V, first, ignore_index, grid=(M,), CHUNKS=config.chunks, LANES=config.lanes,
        VECTOR=config.vector, num_warps=config.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
    return bound, memory_of(3, M, dtype=torch.float32)


def _launch_statistics(logits: Tensor, target: Tensor, first: int, ignore_index: int) -> Tensor:
    M, V = logits.shape
    bound, three_rows = _statistics_for(machine(logits.device), M, V, logits.element_size(), first, ignore_index)
    statistics = maker(logits)(*three_rows)
    if M:
        bound.launch(logits, target, statistics)
    return statistics


@kept
def _join_for(M: int, ranks: int, ignore_index: int, z_loss: float) -> tuple[Bound, Memory, Memory]:
    """With the memory of the rows' numbers, and of the mean and the weight of a row."""
    bound = bind(
        _sharded_join, M, ranks, ignore_index, z_loss, grid=(1,), BLOCK=JOINED_ROWS, num_warps=8, enable_fp_fusion=True
    )
    return bound, memory_of(2, M, dtype=torch.float32), memory_of(2, dtype=torch.float32)


def _launch_join(statistics: Tensor, target: Tensor, ignore_index: int, z_loss: float) -> tuple[Tensor, Tensor]:
    bound, two_rows, two = _join_for(target.shape[0], statistics.shape[0], ignore_index, z_loss)
    make = maker(target)
    rows, mean = make(*two_rows), make(*two)
    bound.launch(statistics, target, rows, mean)
    return rows, mean


@kept
def _backward_for(target: Machine, M: int, V: int, itemsize: int, first: int, ignore_index: int) -> Bound:
    config = LaunchConfig.for_row(V, itemsize=itemsize, warp_size=target.warp_size)
    return bind(
        _sharded_backward, M, V, first, ignore_index, grid=(M, cdiv(V, config.block)), BLOCK=config.block,
        num_warps=config.num_warps, enable_fp_fusion=True,
    )  # fmt: skip


def _launch_backward(
    logits: Tensor,
    target: Tensor,
    rows: Tensor,
    d_loss: Tensor,
    mean: Tensor,
    first: int,
    ignore_index: int,
) -> None:
    M, V = logits.shape
    if M and V:
        bound = _backward_for(machine(logits.device), M, V, logits.element_size(), first, ignore_index)
        bound.launch(logits, target, rows, d_loss, mean)


def _columns(target: Tensor, *, first: int, columns: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Which rows' targets are among the own columns, and at which of them; column 0 for the others; both [M]."""
    local = target - first
    here = (target != ignore_index) & (local >= 0) & (local < columns)
    return here, torch.where(here, local, 0)


def _cpu_statistics(logits: Tensor, target: Tensor, first: int, ignore_index: int) -> Tensor:
    M, V = logits.shape
    statistics = torch.zeros((3, M), dtype=torch.float32, device=logits.device)
    if not V:
        statistics[0] = LOWEST
        return statistics
    here, column = _columns(target, first=first, columns=V, ignore_index=ignore_index)
    for rows in _chunks(M, width=V):
        x = logits[rows].float()
        peak = torch.amax(x, dim=1, out=statistics[0, rows]).clamp_(LOWEST, HIGHEST)
        torch.sum((x - peak[:, None]).exp_(), dim=1, out=statistics[1, rows])
    statistics[2] = torch.where(here, logits.gather(1, column.unsqueeze(1)).squeeze(1).float(), 0.0)
    return statistics


def _cpu_join(statistics: Tensor, target: Tensor, ignore_index: int, z_loss: float) -> tuple[Tensor, Tensor]:
    counts = target != ignore_index
    peak = statistics[:, 0].amax(dim=0)
    summed = (statistics[:, 1] * (statistics[:, 0] - peak).exp_()).sum(dim=0)
    lse = peak + summed.log()
    loss = lse - statistics[:, 2].sum(dim=0)
    if z_loss:
        loss.addcmul_(lse, lse, value=z_loss)
    total = counts.sum().clamp(min=1)
    rows = torch.stack([peak, (1 + 2 * z_loss * lse) / summed])
    return rows, torch.stack([torch.where(counts, loss, 0.0).sum() / total, 1 / total])


def _cpu_backward(
    logits: Tensor,
    target: Tensor,
    rows: Tensor,
    d_loss: Tensor,
    mean: Tensor,
    first: int,
    ignore_index: int,
) -> None:
    counts = target != ignore_index
    here, column = _columns(target, first=first, columns=logits.shape[1], ignore_index=ignore_index)
    weight = torch.where(counts, d_loss / counts.sum().clamp(min=1), 0.0)  # [M]
    for cut in _chunks(*logits.shape):
        d_rows = (logits[cut].float() - rows[0, cut, None]).exp_().mul_(rows[1, cut, None])
        if d_rows.shape[1]:
            d_rows[torch.arange(len(d_rows)), column[cut]] -= here[cut].float()
        logits[cut] = d_rows.mul_(weight[cut, None]).to(logits.dtype)


def _chunks(rows: int, width: int) -> list[slice]:
    step = max(1, CPU_CHUNK // max(1, width))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


_statistics = register(
    "sharded_cross_entropy(Tensor logits, Tensor target, int first, int ignore_index) -> Tensor",
    triton=_launch_statistics,
    cpu=_cpu_statistics,
    fake=lambda logits, target, first, ignore_index: logits.new_empty((3, logits.shape[0]), dtype=torch.float32),
)
_join = register(
    "sharded_cross_entropy_join(Tensor statistics, Tensor target, int ignore_index, float z_loss) -> (Tensor, Tensor)",
    triton=_launch_join,
    cpu=_cpu_join,
    fake=lambda statistics, target, ignore_index, z_loss: (
        statistics.new_empty((2, target.shape[0])),
        statistics.new_empty(2),
    ),
)
_backward = register(
    "sharded_cross_entropy_backward(Tensor(a!) logits, Tensor target, Tensor rows, Tensor d_loss, Tensor mean, int first, "
    "int ignore_index) -> ()",
    triton=_launch_backward,
    cpu=_cpu_backward,
    fake=lambda logits, target, rows, d_loss, mean, first, ignore_index: None,
)


class _ShardedCrossEntropy(OnceFunction):
    @staticmethod
    def forward(
        ctx, logits: Tensor, target: Tensor, first: int, exchange: Exchange | None, options: tuple[int, float]
    ) -> Tensor:
        ignore_index, z_loss = options
        statistics = _statistics(logits, target, first, ignore_index)
        joined = statistics[None] if exchange is None else exchange(statistics)
        rows, mean = _join(joined, target, ignore_index, z_loss)
        ctx.save_for_backward(target, rows, mean)
        ctx.logits, ctx.arguments = logits.detach(), (first, ignore_index)
        return mean[0].clone()

    @staticmethod
    def backward(ctx, d_loss: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, ctx.logits = ctx.logits, None
        if logits is None:
            raise RuntimeError("sharded_cross_entropy: an earlier backward has written over its logits")
        target, rows, mean = ctx.saved_tensors
        _backward(logits, target, rows, d_loss.reshape(1), mean, *ctx.arguments)
        return logits, None, None, None, None


def sharded_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    first: int = 0,
    exchange: Exchange | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
) -> Tensor:
    """Mean cross entropy plus z_loss * mean of lse^2, a float32 scalar with the same bits on all ranks.

    logits: [M, own columns], the columns from `first` on of the full logits. The backward writes their gradient into their memory: it may
    run once, and the logits must not be used otherwise. target: int64 [M], columns of the full logits; rows with `ignore_index` do not
    count. exchange: gathers this rank's float32 [3, M] from all ranks to [ranks, 3, M]. If omitted, this rank has all columns.
    Raises ValueError for a target of another shape or dtype.
    """
    if logits.dim() != 2 or target.shape != logits.shape[:1] or target.dtype != torch.int64:
        raise ValueError(
            f"sharded_cross_entropy: target is {tuple(target.shape)} {target.dtype}; logits {tuple(logits.shape)} need to be "
            f"[M, columns] and the target int64 [M]"
        )
    if needs_reference():
        return sharded_cross_entropy_reference(
            logits, target, first=first, exchange=exchange, ignore_index=ignore_index, z_loss=z_loss
        )
    return _ShardedCrossEntropy.apply(
        logits.contiguous(), target.contiguous(), first, exchange, (ignore_index, float(z_loss))
    )


def sharded_cross_entropy_reference(
    logits: Tensor,
    target: Tensor,
    *,
    first: int = 0,
    exchange: Exchange | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
) -> Tensor:
    """The same in plain torch, float32 inside. Its gradients go through `exchange`, which must be differentiable."""
    x = logits.to(compute_dtype(logits))
    here, column = _columns(target, first=first, columns=x.shape[1], ignore_index=ignore_index)
    lse, picked = x.logsumexp(dim=1), torch.where(here, x.gather(1, column[:, None])[:, 0], 0.0)
    if exchange is not None:
        joined = exchange(torch.stack([lse, picked]).float()).to(x.dtype)  # [ranks, 2, M]
        lse, picked = joined[:, 0].logsumexp(dim=0), joined[:, 1].sum(dim=0)
    counts = target != ignore_index
    loss = torch.where(counts, lse - picked + z_loss * lse.square(), 0.0)
    return loss.sum() / counts.sum().clamp(min=1)


def _eager(
    logits: Tensor,
    target: Tensor,
    *,
    first: int = 0,
    exchange: None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
) -> Tensor:
    lse = torch.logsumexp(logits, dim=1)
    here, column = _columns(target, first=first, columns=logits.shape[1], ignore_index=ignore_index)
    picked = torch.where(here, logits.gather(1, column[:, None])[:, 0], 0.0)
    counts = target != ignore_index
    loss = torch.where(counts, lse - picked + z_loss * lse.square(), 0.0)
    return loss.sum() / counts.sum().clamp(min=1)


def _make_inputs(shape: tuple[int, ...], *, dtype: torch.dtype, device: str, **options: object) -> dict[str, object]:
    M, V = shape
    first = V // 3 + 1
    # Most targets are among the own columns: a gradient without any has the relative error of lse alone, many times eps.
    target = first + torch.randint(0, V, (M,), device=device)
    target[3::5] += V
    target[4::5] = 0
    if M > 2:
        target[::5] = -100
    logits = (2 * torch.randn(shape, device=device)).to(dtype)
    return {"logits": logits, "target": target, "first": first, **options}


SPEC = OpSpec(
    name="sharded_cross_entropy",
    op=sharded_cross_entropy,
    reference=sharded_cross_entropy_reference,
    eager=_eager,
    make_inputs=_make_inputs,
    differentiable=("logits",),
    small_shapes=((1, 2), (5, 41), (3, 1030)),
    bench_shapes=((8192, 16384), (8192, 65536)),
    variants=({}, {"z_loss": 1e-2}),
    num_bytes=lambda shape, itemsize: shape[0] * shape[1] * itemsize,
    num_bytes_backward=lambda shape, itemsize: 2 * shape[0] * shape[1] * itemsize,
    num_flops=lambda shape: 8 * shape[0] * shape[1],
)  # fmt: skip
