"""The next token of each row: head, temperature and Gumbel noise in one pass, without logits in memory.

    logit[v] = x . W[v] + bias[v], capped if the model caps it
    token = argmax of logit[v] / T - log E(v), of logit[v] for T = 0
    logprob = logit[token] - log sum exp logit              processed = logit[token] / T - log sum exp (logit / T), 0 for T = 0

E(v) = -log(1 - u) is exponential: the token with the least E(v) / p(v) is a draw from p (Gumbel-max). u is a function of the row's key and v,
so a draw does not depend on other rows or on the tiles. Reads N K bytes of the weight's format; a program leaves six numbers per row, which
a second kernel merges in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.dependent import dependent_launch, wait_for_kernels
from ztk.kernels.launch.grids import cdiv, next_power_of_2
from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.library import register, use_reference
from ztk.kernels.launch.machine import Machine, machine
from ztk.kernels.launch.memory import empty_matrix, empty_vector
from ztk.kernels.ops.linear_rows import ROWS
from ztk.kernels.shared.product_tiles import LaunchConfig, product_tile, times_rows
from ztk.kernels.shared.rounding import mix, mix_cpu
from ztk.kernels.shared.spec import OpSpec, compute_dtype, tokens_as_numbers
from ztk.kernels.shared.weight_formats import format_of, quantise_weight, widen

NUM_WARPS = 8  # scores, logits and noise of a tile are in registers together
MERGED = 1024  # tiles of the vocabulary that the second kernel reads at once
_PARTS = tl.constexpr(6)  # best score, its token, its logit; maximum and sum of exp; sum of exp at the temperature
_TOP = 2.0**-32
_SMALL = 0.01  # below, -log(1 - u) is summed term by term: the difference to 1 would lose the digits that decide
_UNIT, _BELOW = tl.constexpr(_TOP), tl.constexpr(_SMALL)


@triton.jit
def exponential(o_n, b_key):
    """E(v) of tokens o_n and keys int64 b_key, whose shapes broadcast: float32, above 0"""
    b_low = (b_key & 0xFFFFFFFF).to(tl.uint32)
    b_high = ((b_key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    b_bits = mix(mix(o_n.to(tl.uint32) + b_low) ^ b_high)
    b_u = (b_bits.to(tl.float32) + 0.5) * _UNIT
    b_u = tl.minimum(b_u, 0.99999994)
    b_series = b_u * (1.0 + b_u * (0.5 + b_u * (0.33333334 + b_u * 0.25)))
    return tl.where(b_u < _BELOW, b_series, -tl.log(1.0 - b_u))


@jit(do_not_specialize=["M"])
def _draw_tiles(
    x_ptr, weight_ptr, scales_ptr, bias_ptr, temperature_ptr, keys_ptr, parts_ptr, M, N, K, softcap, FORMAT: tl.constexpr,
    HAS_CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of one tile of the vocabulary: the best token by logit / T - log E, its logit, and the sums of exp"""
    wait_for_kernels(PDL)
    i_n = tl.program_id(0).to(tl.int64)
    i_m = tl.program_id(1).to(tl.int64)
    o_n = (i_n * BLOCK_N).to(tl.int32) + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    o_m = (i_m * BLOCK_M).to(tl.int32) + tl.arange(0, BLOCK_M)
    m_m = o_m < M
    o_x = o_m.to(tl.int64) * K
    b_logit = product_tile(x_ptr, weight_ptr, scales_ptr, o_x, m_m, o_n, m_n, N, K, FORMAT, BLOCK_M, BLOCK_N, BLOCK_K)
    if bias_ptr is not None:
        b_logit += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    if HAS_CAP:
        b_logit = softcap * (2.0 * tl.sigmoid(2.0 * (b_logit / softcap)) - 1.0)
    b_logit = tl.where(m_n[None, :], b_logit, float("-inf"))
    b_t = tl.load(temperature_ptr + o_m, mask=m_m, other=1.0)
    b_warm = tl.where(b_t == 0.0, 1.0, b_t)
    b_scaled = b_logit / b_warm[:, None]
    b_key = tl.load(keys_ptr + o_m, mask=m_m, other=0)
    b_noise = tl.where((b_t == 0.0)[:, None], 0.0, tl.log(exponential(o_n[None, :], b_key[:, None])))
    b_score = b_scaled - b_noise
    b_best = tl.max(b_score, axis=1)
    b_token = tl.min(tl.where(b_score == b_best[:, None], o_n[None, :], N), axis=1)  # of equal ones the first
    b_max = tl.max(b_logit, axis=1)
    b_safe = tl.where(b_max == float("-inf"), 0.0, b_max)
    p_parts = parts_ptr + (o_m.to(tl.int64) * tl.num_programs(0) + i_n) * _PARTS
    tl.store(p_parts, b_best, mask=m_m)
    tl.store(p_parts + 1, b_token.to(tl.float32), mask=m_m)
    tl.store(p_parts + 2, tl.sum(tl.where(o_n[None, :] == b_token[:, None], b_logit, 0.0), axis=1), mask=m_m)
    tl.store(p_parts + 3, b_max, mask=m_m)
    tl.store(p_parts + 4, tl.sum(tl.exp(b_logit - b_safe[:, None]), axis=1), mask=m_m)
    tl.store(p_parts + 5, tl.sum(tl.exp((b_logit - b_safe[:, None]) / b_warm[:, None]), axis=1), mask=m_m)


@jit
def _merge_draws(
    parts_ptr, temperature_ptr, tokens_ptr, logprobs_ptr, processed_ptr, tiles, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Token, logprob and processed of one row, from all tiles of the vocabulary"""
    wait_for_kernels(PDL)
    i_m = tl.program_id(0).to(tl.int64)
    p_row = parts_ptr + i_m * tiles * _PARTS
    t = tl.load(temperature_ptr + i_m)
    warm = tl.where(t == 0.0, 1.0, t)
    b_max = tl.full([BLOCK], float("-inf"), tl.float32)
    b_best = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, tiles, BLOCK):
        o_t = first + tl.arange(0, BLOCK)
        b_best = tl.maximum(b_best, tl.load(p_row + o_t * _PARTS, mask=o_t < tiles, other=float("-inf")))
        b_max = tl.maximum(b_max, tl.load(p_row + o_t * _PARTS + 3, mask=o_t < tiles, other=float("-inf")))
    best = tl.max(b_best, axis=0)
    highest = tl.max(b_max, axis=0)
    b_token = tl.full([BLOCK], 3.0e38, tl.float32)
    b_sum = tl.zeros([BLOCK], tl.float32)
    b_warm_sum = tl.zeros([BLOCK], tl.float32)
    for first in range(0, tiles, BLOCK):
        o_t = first + tl.arange(0, BLOCK)
        m_t = o_t < tiles
        b_is_best = tl.load(p_row + o_t * _PARTS, mask=m_t, other=float("-inf")) == best
        b_here = tl.load(p_row + o_t * _PARTS + 1, mask=m_t, other=3.0e38)
        b_token = tl.minimum(b_token, tl.where(b_is_best & m_t, b_here, 3.0e38))
        b_below = tl.load(p_row + o_t * _PARTS + 3, mask=m_t, other=float("-inf")) - highest
        b_sum += tl.load(p_row + o_t * _PARTS + 4, mask=m_t, other=0.0) * tl.exp(b_below)
        b_warm_sum += tl.load(p_row + o_t * _PARTS + 5, mask=m_t, other=0.0) * tl.exp(b_below / warm)
    token = tl.min(b_token, axis=0)
    b_logit = tl.zeros([BLOCK], tl.float32)
    for first in range(0, tiles, BLOCK):
        o_t = first + tl.arange(0, BLOCK)
        b_is_token = tl.load(p_row + o_t * _PARTS + 1, mask=o_t < tiles, other=-1.0) == token
        b_logit += tl.load(p_row + o_t * _PARTS + 2, mask=b_is_token, other=0.0)
    below = tl.sum(b_logit, axis=0) - highest
    logprob = below - tl.log(tl.sum(b_sum, axis=0))
    tl.store(tokens_ptr + i_m, tl.where(token < 3.0e38, token, 0.0).to(tl.int64))
    tl.store(logprobs_ptr + i_m, logprob)
    tl.store(processed_ptr + i_m, tl.where(t == 0.0, logprob * 0.0, below / warm - tl.log(tl.sum(b_warm_sum, axis=0))))


@kept
def _kernels_for(
    target: Machine, M: int, N: int, K: int, kind: str, itemsize: int, softcap: float
) -> tuple[Bound, Bound]:
    """A draw per tile of tokens, and the best of them."""
    config = LaunchConfig.for_weight(N, itemsize=itemsize, target=target)
    tiles = cdiv(N, config.block_n)
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": True, **dependent_launch(target)}
    draw = bind(
        _draw_tiles, M, N, K, softcap, grid=(tiles, cdiv(M, ROWS)), FORMAT=kind, HAS_CAP=softcap > 0, BLOCK_M=ROWS,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, num_stages=config.num_stages, **options,
    )  # fmt: skip
    return draw, bind(_merge_draws, tiles, grid=(M,), BLOCK=min(MERGED, next_power_of_2(tiles)), **options)


def _launch(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    temperature: Tensor,
    keys: Tensor,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    (M, K), N = x.shape, weight.shape[0]
    outputs = _empty(x)
    if not M:
        return outputs
    target, kind = machine(x.device), format_of(weight, scales)
    draw, merge = _kernels_for(target, M, N, K, kind, x.element_size(), softcap)
    parts = empty_matrix(M, columns=6 * draw.grid[0], dtype=torch.float32, like=x)
    draw.launch(x, weight, scales, bias, temperature, keys, parts)
    merge.launch(parts, temperature, *outputs)
    return outputs


def _empty(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(empty_vector(x.shape[0], dtype=dtype, like=x) for dtype in (torch.int64, torch.float32, torch.float32))


def noise(keys: Tensor, *, tokens: int) -> Tensor:
    """log E(v), float32 [M, tokens]."""
    index = torch.arange(tokens, dtype=torch.int32, device=keys.device)
    rows = []
    for key in keys.tolist():
        low, high = (torch.tensor((part + 2**31) % 2**32 - 2**31, dtype=torch.int32) for part in (key, key >> 32))
        rows.append(mix_cpu(mix_cpu(index + low) ^ high))
    bits = torch.stack(rows).long() & 0xFFFFFFFF
    u = ((bits.float() + 0.5) * _TOP).clamp(max=0.99999994)
    series = u * (1 + u * (0.5 + u * (1 / 3 + u * 0.25)))
    return torch.where(u < _SMALL, series, -torch.log(1 - u)).log()


def _drawn(logits: Tensor, *, temperature: Tensor, keys: Tensor, softcap: float) -> tuple[Tensor, Tensor, Tensor]:
    """logits: [M, N], before the cap."""
    if softcap > 0:
        logits = torch.tanh(logits / softcap) * softcap
    warm = torch.where(temperature == 0, 1.0, temperature).to(logits.dtype).unsqueeze(1)
    shift = torch.where(temperature.unsqueeze(1) == 0, 0.0, noise(keys, tokens=logits.shape[1]))
    tokens = (logits / warm - shift).argmax(1)
    place = tokens.unsqueeze(1)
    logprobs = logits.log_softmax(1).gather(1, place).squeeze(1)
    processed = (logits / warm).log_softmax(1).gather(1, place).squeeze(1)
    return tokens, logprobs, torch.where(temperature == 0, logprobs * 0, processed)


def _cpu(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    temperature: Tensor,
    keys: Tensor,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if not len(x):
        return _empty(x)
    logits = times_rows(x.float(), widen(weight, scales=scales, columns=x.shape[1]))
    if bias is not None:
        logits.add_(bias.float())
    # Row by row, and the sums in double precision: neither depends on how many rows there are.
    rows = [
        _drawn(logits[m : m + 1].double(), temperature=temperature[m : m + 1], keys=keys[m : m + 1], softcap=softcap)
        for m in range(len(x))
    ]
    tokens, logprobs, processed = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return tokens, logprobs.float(), processed.float()


_draw = register(
    "draw_rows(Tensor x, Tensor weight, Tensor? scales, Tensor? bias, Tensor temperature, Tensor keys, float softcap) "
    "-> (Tensor, Tensor, Tensor)",
    triton=_launch,
    cpu=_cpu,
    fake=lambda x, *rest: _empty(x),
)


def draw_rows(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    temperature: Tensor,
    keys: Tensor,
    *,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens int64, logprobs float32, processed float32), [M] each: a token per row and its log-probabilities; no gradient.

    x: [M, K]; weight [N, K] of one of the formats of `shared.weight_formats` with its scales; bias: [N], 0 if None;
    temperature: float32 [M], 0 takes the likeliest; keys: int64 [M], which decide the noise. softcap: c tanh(logit / c); 0: none. A
    logprob is not finite where a logit is NaN or infinite.
    Raises ValueError for shapes and dtypes that do not fit.
    """
    kind = format_of(weight, scales)
    if x.dim() != 2 or weight.dim() != 2 or (kind != "int4" and weight.shape[1] != x.shape[1]):
        raise ValueError(f"draw_rows: x {tuple(x.shape)} does not fit a weight of {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"draw_rows: bias {tuple(bias.shape)} does not fit a weight of {tuple(weight.shape)}")
    if temperature.shape != keys.shape or keys.shape != x.shape[:1] or keys.dtype != torch.int64:
        raise ValueError(
            f"draw_rows: temperature {tuple(temperature.shape)} and keys {tuple(keys.shape)} must be [{x.shape[0]}]"
        )
    x = x.contiguous()
    if use_reference():
        return draw_rows_reference(x, weight, scales, bias, temperature, keys, softcap=softcap)
    return _draw(x, weight, scales, bias, temperature, keys, softcap)


def draw_rows_reference(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    temperature: Tensor,
    keys: Tensor,
    *,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in plain torch, from all logits."""
    dtype = compute_dtype(x)
    logits = x.to(dtype) @ widen(weight, scales=scales, columns=x.shape[1]).to(dtype).T
    if bias is not None:
        logits = logits + bias.to(dtype)
    tokens, logprobs, processed = _drawn(logits, temperature=temperature, keys=keys, softcap=softcap)
    return tokens, logprobs.float(), processed.float()


def _make_inputs(shape, *, dtype, device, kind="plain", with_bias=False, **options) -> dict[str, object]:
    M, K, N = shape
    weight, scales = quantise_weight(torch.randn(N, K, device=device) * 2 * K**-0.5, kind=kind)
    return {
        "x": torch.randn(M, K, device=device).to(dtype),
        "weight": weight.to(dtype) if kind == "plain" else weight,
        "scales": scales,
        "bias": torch.randn(N, device=device).to(dtype) if with_bias else None,
        "temperature": (torch.arange(M) % 3 * 0.6).to(device),
        "keys": (torch.arange(M) * 0x1234567890AB - 2**40).to(device),
        **options,
    }


SPEC = OpSpec(
    name="draw_rows",
    op=tokens_as_numbers(draw_rows),
    reference=tokens_as_numbers(draw_rows_reference),
    make_inputs=_make_inputs,
    small_shapes=((3, 64, 40), (5, 48, 300)),
    bench_shapes=((1, 4096, 128256), (64, 4096, 128256)),
    variants=({}, {"kind": "int8", "softcap": 5.0, "with_bias": True}, {"with_bias": True}),
    num_bytes=lambda shape, itemsize: (shape[2] + shape[0]) * shape[1] * itemsize,
    num_flops=lambda shape: 2 * shape[0] * shape[1] * shape[2],
    interpreted_dtypes=(torch.float32, torch.bfloat16),
    tolerance_ulps=64.0,  # of float32: logits up to 8 in differences that may be a tenth of one
)
