"""Advantages of packed answers in one launch: a scan from the last token of every segment to its first.

    delta[t] = r[t] + gamma * v[t + 1] - v[t]                (v after a segment's end is 0)
    a[t]     = delta[t] + gamma * lambda * a[t + 1]          (a after a segment's end is 0)

Generalised advantage estimation, Schulman et al. 2016, https://arxiv.org/abs/1506.02438. Reads rewards and values once and writes the
advantages: 12 bytes per token in float32; the value of the next token comes from the cache. No gradient: advantages are constants of a
loss.

A program has one segment and goes through it in tiles, the last first. Inside a tile the recurrence is a scan over pairs (factor, sum),
which is associative; the following tile enters through its factor. A segment's result depends on its own tokens alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.library import register, use_reference
from ztk.kernels.launch.memory import empty_vector
from ztk.kernels.shared.spec import OpSpec

BLOCK, NUM_WARPS = 512, 4  # tokens of a tile: most answers take one or two


@triton.jit
def _joined(factor_after, sum_after, factor, sum):
    """(factor, sum) of a token together with later ones: a = sum + factor * (a of the next token)"""
    return factor * factor_after, sum + factor * sum_after


@jit
def _segment_scan(reward_ptr, value_ptr, start_ptr, out_ptr, gamma, decay, BLOCK: tl.constexpr):
    """The advantages of one segment"""
    i_s = tl.program_id(0).to(tl.int64)
    first = tl.load(start_ptr + i_s)
    end = tl.load(start_ptr + i_s + 1)
    o_n = tl.arange(0, BLOCK)
    carry = 0.0  # the advantage after the tile
    for stop in range(0, end - first, BLOCK):
        o_t = end - stop - BLOCK + o_n
        m_t = o_t >= first
        b_v = tl.load(value_ptr + o_t, mask=m_t, other=0.0)
        b_next = tl.load(value_ptr + o_t + 1, mask=m_t & (o_t + 1 < end), other=0.0)
        b_delta = tl.load(reward_ptr + o_t, mask=m_t, other=0.0) + gamma * b_next - b_v
        b_factor = tl.full([BLOCK], 1.0, dtype=tl.float32) * decay
        b_factor, b_sum = tl.associative_scan((b_factor, b_delta), axis=0, combine_fn=_joined, reverse=True)
        b_out = b_sum + b_factor * carry
        tl.store(out_ptr + o_t, b_out, mask=m_t)
        carry = tl.sum(tl.where(o_n == 0, b_out, 0.0), axis=0)


@kept
def _kernel_for(segments: int, gamma: float, decay: float) -> Bound:
    return bind(_segment_scan, gamma, decay, grid=(segments,), BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=True)


def _launch(rewards: Tensor, values: Tensor, starts: Tensor, gamma: float, decay: float) -> Tensor:
    tokens, segments = rewards.numel(), starts.numel() - 1
    out = empty_vector(tokens, dtype=rewards.dtype, like=rewards)
    if segments and tokens:
        _kernel_for(segments, gamma, decay).launch(rewards, values, starts, out)
    return out


def _cpu(rewards: Tensor, values: Tensor, starts: Tensor, gamma: float, decay: float) -> Tensor:
    """Every pass doubles the number of later tokens in each sum, over all tokens at once: as many passes as the longest segment's length
    has bits. Tokens after a segment's end add zero, so that other segments change no bit."""
    lengths = starts.diff()
    left = (starts[1:].repeat_interleave(lengths) - torch.arange(rewards.numel())).sub_(
        1
    )  # later tokens of the segment
    following = torch.zeros_like(values)
    following[:-1] = values[1:]
    out = rewards + gamma * following.where(left > 0, 0.0) - values
    reach, factor = 1, decay
    longest = int(lengths.max()) if lengths.numel() else 0
    while reach < longest:
        out[:-reach] += factor * out[reach:].where(left[:-reach] >= reach, 0.0)
        reach, factor = 2 * reach, factor * factor
    return out


_op = register(
    "segment_scan(Tensor rewards, Tensor values, Tensor starts, float gamma, float decay) -> Tensor",
    triton=_launch,
    cpu=_cpu,
    fake=lambda rewards, values, starts, gamma, decay: torch.empty_like(rewards),
)


def segment_scan(rewards: Tensor, values: Tensor, lengths: Tensor, *, gamma: float = 1.0, lam: float = 0.95) -> Tensor:
    """Generalised advantages of segments that follow each other.

    rewards, values: [T], of every token and of the state before it, float32; on a CPU also float64. lengths: the segments' lengths, int64 [S],
    which sum to T. Returns [T] of the dtype of rewards, without a gradient. Raises ValueError for other shapes and dtypes.
    """
    dtypes = (torch.float32, torch.float64) if rewards.device.type == "cpu" else (torch.float32,)
    if (
        rewards.dim() != 1
        or values.shape != rewards.shape
        or values.dtype != rewards.dtype
        or rewards.dtype not in dtypes
    ):
        raise ValueError(
            f"segment_scan: rewards {tuple(rewards.shape)} {rewards.dtype} and values {tuple(values.shape)} {values.dtype} must be [T] and of "
            f"one dtype, {' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}"
        )
    if lengths.dim() != 1 or lengths.dtype != torch.int64:
        raise ValueError(f"segment_scan: lengths is {tuple(lengths.shape)} {lengths.dtype}; pass int64 [S]")
    if lengths.device.type == "cpu" and int(lengths.sum()) != rewards.numel():
        raise ValueError(f"segment_scan: lengths sum to {int(lengths.sum())} and there are {rewards.numel()} tokens")
    if use_reference():
        return segment_scan_reference(rewards, values, lengths, gamma=gamma, lam=lam)
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return _op(rewards.detach().contiguous(), values.detach().contiguous(), starts, gamma, gamma * lam)


def segment_scan_reference(
    rewards: Tensor, values: Tensor, lengths: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> Tensor:
    """The same by the definition, one token after another: [T] of the dtype of rewards."""
    parts = []
    for r, v in zip(rewards.split(lengths.tolist()), values.split(lengths.tolist()), strict=True):
        out, following, next_value = torch.empty_like(r), 0.0, 0.0
        for t in reversed(range(len(r))):
            following = r[t] + gamma * next_value - v[t] + gamma * lam * following
            out[t], next_value = following, v[t]
        parts.append(out)
    return torch.cat(parts) if parts else torch.empty_like(rewards)


def _make_inputs(
    shape: tuple[int, ...], *, dtype: torch.dtype, device: str, gamma: float = 1.0, lam: float = 0.95
) -> dict[str, object]:
    """shape: segments and the tokens of the longest; the others are shorter, down to none."""
    S, longest = shape
    lengths = [longest * (S - row) // S for row in range(S - 1)] + [0] if S > 1 else [longest]
    T = sum(lengths)
    rewards, values = (torch.randn(T, device=device).to(dtype) for _ in range(2))
    return {
        "rewards": rewards,
        "values": values,
        "lengths": torch.tensor(lengths, device=device),
        "gamma": gamma,
        "lam": lam,
    }


def _tokens(shape: tuple[int, ...]) -> int:
    return sum(shape[1] * (shape[0] - row) // shape[0] for row in range(max(1, shape[0] - 1)))


SPEC = OpSpec(
    name="segment_scan",
    op=segment_scan,
    reference=segment_scan_reference,
    make_inputs=_make_inputs,
    small_shapes=((1, 1), (3, 7), (5, 40)),
    bench_shapes=((64, 8192), (1024, 2048)),
    variants=({}, {"gamma": 0.9, "lam": 1.0}),
    dtypes=(torch.float32,),
    interpreted_dtypes=(torch.float32,),
    tolerance_ulps=4.0,  # of sums of as many terms as 1 / (1 - gamma * lambda)
    num_bytes=lambda shape, itemsize: 3 * itemsize * _tokens(shape),
    num_flops=lambda shape: 6 * _tokens(shape),
)
