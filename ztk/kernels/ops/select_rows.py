"""The next token of each row of logits after top-k, top-p and min-p, on the device.

    s = scores / T       top-k keeps s >= the k-th largest       top-p: then those whose larger ones have less than p of the kept probability
    min-p: then s >= max + log(min_p)       token = argmax of s - log E over the kept ones, as in `draw_rows`; of equal ones all are kept
    logprob = logit[token] - log sum exp logit       processed = s[token] - log sum over the kept ones of exp s

scores: logits after bias and penalties. T = 0 takes the likeliest, and processed is 0. No row is sorted: a threshold is the least number t
such that fewer than k scores (less than p of the probability) exceed it, found by bisecting the 32 bits of an ordered float32. Each step is
a pass over the row, from the cache. A program has a row, so its sums do not depend on others. Reads 8 N bytes of a row from memory.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.dependent import dependent_launch, wait_for_kernels
from ztk.kernels.launch.grids import next_power_of_2
from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.library import register, use_reference
from ztk.kernels.launch.machine import Machine, machine
from ztk.kernels.launch.memory import Memory, maker, memory_of
from ztk.kernels.ops.draw_rows import exponential, noise
from ztk.kernels.shared.spec import OpSpec, tokens_as_numbers

BLOCK, NUM_WARPS = 2048, 8  # of a row at a time; 16 bytes of scores per thread twice
_LEAST, _GREATEST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)


@triton.jit
def _ordered(b_s):
    """int32 in the order of float32 b_s; -0 is 0"""
    b_bits = (b_s + 0.0).to(tl.int32, bitcast=True)
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _above(p_row, N, bound, highest, cold, BLOCK: tl.constexpr):
    """Number of scores above the ordered `bound`, and the sum of their exp(cold (s - highest))"""
    b_count = tl.zeros([BLOCK], tl.int32)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for first in range(0, N, BLOCK):
        o_n = first + tl.arange(0, BLOCK)
        b_s = tl.load(p_row + o_n, mask=o_n < N, other=float("-inf"))
        b_key = _ordered(b_s).to(tl.int64)
        m_above = (b_key > bound) & (o_n < N)
        b_count += m_above.to(tl.int32)
        b_sum += tl.where(m_above, tl.exp((b_s - highest) * cold), 0.0)
    return tl.sum(b_count, axis=0), tl.sum(b_sum, axis=0)


@jit
def _select_rows(
    logits_ptr, scores_ptr, temperature_ptr, keys_ptr, top_k_ptr, top_p_ptr, min_p_ptr, tokens_ptr, logprobs_ptr,
    processed_ptr, N, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Token, logprob and processed of one row"""
    wait_for_kernels(PDL)
    i_m = tl.program_id(0).to(tl.int64)
    p_logits = logits_ptr + i_m * N
    p_row = scores_ptr + i_m * N
    t = tl.load(temperature_ptr + i_m)
    key = tl.load(keys_ptr + i_m)
    top_k = tl.where(t == 0.0, 0, tl.load(top_k_ptr + i_m))
    top_p = tl.where(t == 0.0, 1.0, tl.load(top_p_ptr + i_m))
    min_p = tl.where(t == 0.0, 0.0, tl.load(min_p_ptr + i_m))
    warm = tl.where(t == 0.0, 1.0, t)
    cold = 1.0 / warm

    b_raw = tl.full([BLOCK], float("-inf"), tl.float32)
    b_high = tl.full([BLOCK], float("-inf"), tl.float32)
    b_odd = tl.zeros([BLOCK], tl.int32)
    for first in range(0, N, BLOCK):
        o_n = first + tl.arange(0, BLOCK)
        b_x = tl.load(p_logits + o_n, mask=o_n < N, other=0.0)
        b_odd += (((b_x - b_x) != 0.0) & (o_n < N)).to(tl.int32)  # NaN or infinite
        b_raw = tl.maximum(b_raw, tl.where(o_n < N, b_x, float("-inf")))
        b_high = tl.maximum(b_high, tl.load(p_row + o_n, mask=o_n < N, other=float("-inf")))
    is_odd = tl.sum(b_odd, axis=0) > 0
    raw_high = tl.max(b_raw, axis=0)
    highest = tl.max(b_high, axis=0)

    bottom = tl.full([], _LEAST, tl.int64)
    least = bottom
    if (top_k > 0) & (top_k < N):
        low = bottom - 1
        high = tl.full([], _GREATEST, tl.int64)
        for _ in range(0, 32):
            middle = (low + high) >> 1
            count, _sum = _above(p_row, N, middle, highest, cold, BLOCK)
            is_enough = count < top_k
            high = tl.where(is_enough, middle, high)
            low = tl.where(is_enough, low, middle)
        least = high
    if top_p < 1.0:
        _count, full = _above(p_row, N, least - 1, highest, cold, BLOCK)
        low = least - 1
        high = tl.full([], _GREATEST, tl.int64)
        for _ in range(0, 32):
            middle = (low + high) >> 1
            _count, mass = _above(p_row, N, middle, highest, cold, BLOCK)
            is_less = mass < top_p * full
            high = tl.where(is_less, middle, high)
            low = tl.where(is_less, low, middle)
        least = tl.minimum(high, _ordered(highest).to(tl.int64))  # the likeliest stays for any top_p
    if min_p > 0.0:
        least = tl.maximum(least, _ordered(highest + warm * tl.log(min_p)).to(tl.int64))

    b_best = tl.full([BLOCK], float("-inf"), tl.float32)
    b_token = tl.full([BLOCK], _GREATEST, tl.int32)
    b_kept = tl.zeros([BLOCK], tl.float32)
    for first in range(0, N, BLOCK):
        o_n = first + tl.arange(0, BLOCK)
        b_s = tl.load(p_row + o_n, mask=o_n < N, other=float("-inf"))
        m_kept = (_ordered(b_s).to(tl.int64) >= least) & (o_n < N)
        b_noise = tl.where(t == 0.0, 0.0, tl.log(exponential(o_n, key)))
        b_score = tl.where(m_kept, b_s * cold - b_noise, float("-inf"))
        b_token = tl.where(b_score > b_best, o_n, b_token)
        b_best = tl.maximum(b_best, b_score)
        b_kept += tl.where(m_kept, tl.exp((b_s - highest) * cold), 0.0)
    best = tl.max(b_best, axis=0)
    token = tl.min(tl.where(b_best == best, b_token, _GREATEST), axis=0)  # of equal ones the first
    token = tl.where(token < N, token, 0)
    _count, total = _above(p_logits, N, bottom - 1, raw_high, 1.0, BLOCK)
    logprob = tl.load(p_logits + token) - raw_high - tl.log(total)
    processed = (tl.load(p_row + token) - highest) * cold - tl.log(tl.sum(b_kept, axis=0))
    tl.store(tokens_ptr + i_m, token.to(tl.int64))
    tl.store(logprobs_ptr + i_m, tl.where(is_odd, float("nan"), logprob))
    tl.store(processed_ptr + i_m, tl.where(t == 0.0, 0.0, processed))


@kept
def _kernel_for(target: Machine, M: int, N: int) -> tuple[Bound, Memory, Memory]:
    """With the memory of the tokens, and of their log-probabilities."""
    block = min(BLOCK, next_power_of_2(N))
    bound = bind(
        _select_rows, N, grid=(M,), BLOCK=block, num_warps=max(1, NUM_WARPS * block // BLOCK), enable_fp_fusion=True,
        **dependent_launch(target),
    )  # fmt: skip
    return bound, memory_of(M, dtype=torch.int64), memory_of(M, dtype=torch.float32)


def _launch(
    logits: Tensor, scores: Tensor, temperature: Tensor, keys: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    M, N = logits.shape
    select, integers, numbers = _kernel_for(machine(logits.device), M, N)
    make = maker(logits)
    tokens, logprobs, processed = make(*integers), make(*numbers), make(*numbers)
    if M:
        select.launch(logits, scores, temperature, keys, top_k, top_p, min_p, tokens, logprobs, processed)
    return tokens, logprobs, processed


def _empty(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    M = logits.shape[0]
    return logits.new_empty(M, dtype=torch.int64), *(logits.new_empty(M, dtype=torch.float32) for _ in range(2))


def _kept(s: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """s [N] with dropped scores at -inf."""
    highest = s.max()
    if 0 < top_k < len(s):
        s = s.masked_fill(s < s.topk(top_k).values[-1], -math.inf)
    if top_p < 1:
        ordered = s.sort(descending=True).values
        probabilities = ordered.softmax(0)
        before = probabilities.cumsum(0) - probabilities
        least = ordered[(before < top_p).nonzero().max()] if top_p > 0 else highest
        s = s.masked_fill(s < least, -math.inf)
    return s.masked_fill(s < highest + math.log(min_p), -math.inf) if min_p > 0 else s


def _cpu(logits: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return select_rows_reference(logits, *rest) if len(logits) else _empty(logits)


_select = register(
    "select_rows(Tensor logits, Tensor scores, Tensor temperature, Tensor keys, Tensor top_k, Tensor top_p, Tensor min_p)"
    " -> (Tensor, Tensor, Tensor)",
    triton=_launch,
    cpu=_cpu,
    fake=lambda logits, *rest: _empty(logits),
)


def select_rows(
    logits: Tensor, scores: Tensor, temperature: Tensor, keys: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens int64, logprobs float32, processed float32), [M] each: a token per row and its log-probabilities; no gradient.

    logits: float32 [M, N]; scores: the same after bias and penalties, may be the same tensor. temperature, top_p, min_p: float32 [M]; keys:
    int64 [M], which decide the noise; top_k: int32 [M], 0 keeps all. A logprob is NaN where a logit is NaN or infinite.
    Raises ValueError for shapes and dtypes that do not fit.
    """
    if logits.dim() != 2 or logits.shape != scores.shape or {logits.dtype, scores.dtype} != {torch.float32}:
        raise ValueError(
            f"select_rows: logits {tuple(logits.shape)} and scores {tuple(scores.shape)} must be float32 [M, N]"
        )
    columns = {"temperature": temperature, "keys": keys, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    dtypes = {"keys": torch.int64, "top_k": torch.int32}
    for name, column in columns.items():
        if column.shape != logits.shape[:1] or column.dtype != dtypes.get(name, torch.float32):
            raise ValueError(
                f"select_rows: {name} is {column.dtype} {tuple(column.shape)}: must be {dtypes.get(name, torch.float32)} [{len(logits)}]"
            )
    run = _cpu if use_reference() else _select
    return run(logits.contiguous(), scores.contiguous(), temperature, keys, top_k, top_p, min_p)


def select_rows_reference(
    logits: Tensor, scores: Tensor, temperature: Tensor, keys: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in plain torch, by sorting, a row at a time, in double precision."""
    rows = []
    for m in range(len(logits)):
        t, raw = float(temperature[m]), logits[m].double()
        s = scores[m].double() / (t or 1.0)
        if t != 0:
            s = _kept(s, top_k=int(top_k[m]), top_p=float(top_p[m]), min_p=float(min_p[m]))
        token = (s if t == 0 else s - noise(keys[m : m + 1], tokens=len(s))[0]).argmax()
        finite = raw.isfinite().all()
        logprob = raw.log_softmax(0)[token] if finite else raw.new_tensor(math.nan)
        rows.append((token, logprob, s.log_softmax(0)[token] if t != 0 else raw.new_zeros(())))
    tokens, logprobs, processed = (torch.stack(part) for part in zip(*rows, strict=True))
    return tokens, logprobs.float(), processed.float()


def _make_inputs(shape, *, dtype, device, **options) -> dict[str, object]:
    M, N = shape
    row = torch.arange(M)
    logits = torch.randn(M, N, device=device).to(dtype) * 2
    return {
        "logits": logits,
        "scores": logits - (torch.arange(N, device=device) % 3 == 0).to(dtype) * 0.5,
        "temperature": (row % 4 * 0.4).to(device),
        "keys": (row * 0x1234567890AB - 2**40).to(device),
        "top_k": (row % 5 * 7 % (N + 3)).to(device, torch.int32),
        "top_p": (1.0 - (row % 3 == 2) * 0.5).to(device),
        "min_p": (row % 2 * 0.2).to(device),
        **options,
    }


SPEC = OpSpec(
    name="select_rows",
    op=tokens_as_numbers(select_rows),
    reference=tokens_as_numbers(select_rows_reference),
    make_inputs=_make_inputs,
    small_shapes=((7, 40), (7, 301)),
    bench_shapes=((1, 128256), (64, 128256)),
    num_bytes=lambda shape, itemsize: 8 * shape[0] * shape[1],
    num_flops=lambda shape: 10 * shape[0] * shape[1],
    dtypes=(torch.float32,),
    interpreted_dtypes=(torch.float32,),
    tolerance_ulps=64.0,  # sums of exp over thousands of scores, in differences that may be a tenth of one
)
