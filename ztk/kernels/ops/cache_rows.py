"""Prepares a step's projected rows for attention in one pass: norm of heads, rotary embedding, keys and values into their blocks.

    q, k = rope(norm(x)), norm(x) = x / sqrt(mean(x^2) + eps) w over each head        v as it is

Reads and writes (H + 2K) D elements per row. Keys and values go to place p of the cache: position p % 64 of block p / 64; a row whose
place is negative is not stored. A byte cache stores fp8 (e4m3), divided by the head's scale if there are scales.
"""

import torch
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.dependent import dependent_launch, wait_for_kernels
from ztk.kernels.launch.grids import next_power_of_2
from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.library import is_plain_cpu, register, use_reference
from ztk.kernels.launch.machine import Machine, machine
from ztk.kernels.launch.memory import Memory, maker, memory_of
from ztk.kernels.shared.cached_attention import BLOCK, Scratch
from ztk.kernels.shared.cpu_rows import rms_norm, rope, turns
from ztk.kernels.shared.fp8 import encode_fp8, to_fp8
from ztk.kernels.shared.math import cast
from ztk.kernels.shared.spec import OpSpec, compute_dtype

_BLOCK = tl.constexpr(BLOCK)


@jit
def _cache_rows(
    rows_ptr, query_norm_ptr, key_norm_ptr, cos_ptr, sin_ptr, positions_ptr, places_ptr, query_ptr, keys_ptr, values_ptr,
    scales_ptr, stride_block, half, eps, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one row: normalised, turned and written to the queries, or to its place in the cache"""
    wait_for_kernels(PDL)
    i_m = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1).to(tl.int64)
    place = tl.load(places_ptr + i_m)  # here, where it takes no time of its own
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    p_x = rows_ptr + (i_m * (H + 2 * K) + i_h) * D
    b_x = tl.load(p_x + o_d, mask=m_d, other=0.0).to(tl.float32)
    if i_h < H + K:
        o_pair = o_d
        if cos_ptr is not None:
            o_pair = tl.where(o_d < half, o_d + half, tl.where(o_d < 2 * half, o_d - half, o_d))
        b_pair = tl.load(p_x + o_pair, mask=m_d, other=0.0).to(tl.float32)
        if query_norm_ptr is not None:
            p_w = query_norm_ptr if i_h < H else key_norm_ptr
            b_rstd = 1.0 / tl.sqrt_rn(tl.sum(b_x * b_x, axis=0) / D + eps)
            b_x = b_x * b_rstd * tl.load(p_w + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_pair = b_pair * b_rstd * tl.load(p_w + o_pair, mask=m_d, other=0.0).to(tl.float32)
        if cos_ptr is not None:
            position = tl.load(positions_ptr + i_m)
            o_turn = position * half + tl.where(o_d < half, o_d, o_d - half)
            m_turn = o_d < 2 * half
            b_cos = tl.load(cos_ptr + o_turn, mask=m_turn, other=1.0)
            b_sin = tl.load(sin_ptr + o_turn, mask=m_turn, other=0.0)
            b_x = b_x * b_cos + tl.where(o_d < half, -b_pair, b_pair) * b_sin
    if i_h < H:
        tl.store(query_ptr + (i_m * H + i_h) * D + o_d, cast(b_x, query_ptr.dtype.element_ty), mask=m_d)
    else:
        p_cache = keys_ptr if i_h < H + K else values_ptr
        head = (i_h - H) % K
        p_cache += (place // _BLOCK) * stride_block + (head * _BLOCK + place % _BLOCK) * D + o_d
        m_c = o_d < tl.where(place < 0, 0, D)
        if keys_ptr.dtype.element_ty == tl.uint8:
            if scales_ptr is not None:
                b_x = b_x * (1.0 / tl.load(scales_ptr + i_h - H))  # exact: a power of two
            tl.store(p_cache, encode_fp8(b_x), mask=m_c)
        else:
            tl.store(p_cache, cast(b_x, keys_ptr.dtype.element_ty), mask=m_c)


@kept
def _kernel_for(
    target: Machine, M: int, width: int, dtype: torch.dtype, K: int, D: int, stride_block: int, half: int, eps: float
) -> tuple[Bound, Memory]:
    """With the memory of the queries. width, dtype: the rows'. stride_block: the keys'."""
    H = width // D - 2 * K
    bound = bind(
        _cache_rows, stride_block, half, eps, grid=(M, H + 2 * K), H=H, K=K, D=D, BLOCK_D=next_power_of_2(D), num_warps=1,
        enable_fp_fusion=True, **dependent_launch(target),
    )  # fmt: skip
    return bound, memory_of(M, H, D, dtype=dtype)


def _launch(
    rows: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, cos: Tensor | None, sin: Tensor | None, positions: Tensor,
    places: Tensor, keys: Tensor, values: Tensor, scales: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    (M, width), (_, K, _, D) = rows.shape, keys.shape
    half = 0 if cos is None else cos.shape[1]
    kernel, queries = _kernel_for(machine(rows.device), M, width, rows.dtype, K, D, keys.stride()[0], half, eps)
    query = maker(rows)(*queries)
    if M:
        kernel.launch(rows, query_norm, key_norm, cos, sin, positions, places, query, keys, values, scales)
    return query


def _turned(
    rows, query_norm, key_norm, cos, sin, positions, *, K: int, D: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised and rotated queries and keys, and values, [M, heads, D] each, in the reference's compute dtype."""
    wide = rows.to(compute_dtype(rows)).unflatten(1, (-1, D))
    query, key, value = wide.split([wide.shape[1] - 2 * K, K, K], dim=1)
    if query_norm is not None:
        rstd = [torch.rsqrt(part.square().mean(-1, keepdim=True) + eps) for part in (query, key)]
        query, key = query * rstd[0] * query_norm.to(wide.dtype), key * rstd[1] * key_norm.to(wide.dtype)
    if cos is not None:
        turn = [table.to(wide.dtype)[positions].unsqueeze(1) for table in (cos, sin)]
        query, key = (_rotated(part, *turn) for part in (query, key))
    return query, key, value


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _divided(pair: list[Tensor], *, scales: Tensor | None) -> list[Tensor]:
    """Keys and values [M, K, D] as they are stored."""
    return (
        pair if scales is None else [part / own.to(part.dtype)[:, None] for part, own in zip(pair, scales, strict=True)]
    )


def _cpu(
    rows: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, cos: Tensor | None, sin: Tensor | None, positions: Tensor,
    places: Tensor, keys: Tensor, values: Tensor, scales: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    found = _written(rows, query_norm, key_norm, cos, sin, positions, places, keys, values, scales, eps, Scratch())
    return found.clone(memory_format=torch.contiguous_format)  # the result of an op is no view of its input


def _written(
    rows: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, cos: Tensor | None, sin: Tensor | None, positions: Tensor,
    places: Tensor, keys: Tensor, values: Tensor, scales: Tensor | None, eps: float, scratch: Scratch,
) -> Tensor:  # fmt: skip
    """In float32. Zeros the values of a block that begins here, so that none of an earlier sequence is read."""
    _, K, _, D = keys.shape
    x = rows.float().view(len(rows), -1, D)
    heads = x.shape[1] - 2 * K
    turned, value = x[:, : heads + K], x[:, heads + K :]
    if query_norm is not None and key_norm is not None:
        parts = ((turned[:, :heads], query_norm.float()), (turned[:, heads:], key_norm.float()))
        turned = torch.cat([rms_norm(part, weight=weight, eps=eps) for part, weight in parts], dim=1)
    if cos is not None and sin is not None:
        by = scratch.once("turns", id(cos), make=lambda: turns((cos, sin), positions=positions))
        turned = rope(turned, cos=by[0], sin=by[1])
    pair = _divided([turned[:, heads:], value], scales=scales)
    own, lines, begun = scratch.once("lines", make=lambda: _lines(places, cache=keys))
    for cache, part in zip((keys, values), pair, strict=True):
        stored = (part if own is None else part[own]).reshape(-1, D)
        stored = to_fp8(stored) if cache.dtype == torch.uint8 else stored.to(cache.dtype)
        flat = cache.as_strided(((len(cache) - 1) * cache.stride(0) // D + K * BLOCK, D), (D, 1))
        if cache is values and len(begun):
            cache[begun] = 0
        flat.index_copy_(0, lines, stored)
    return turned[:, :heads].to(rows.dtype)


def _lines(places: Tensor, *, cache: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """Rows with a place, or None for all; for each of their heads the line of the cache as [lines, D], int64 [rows K]; and the blocks whose
    first place is written."""
    kept = places >= 0
    own = None if kept.all() else kept.nonzero().squeeze(1)
    places = places if own is None else places[own]
    K, D = cache.shape[1], cache.shape[3]
    block, within = places // BLOCK, places % BLOCK
    heads = torch.arange(0, K * BLOCK, BLOCK, device=places.device)
    lines = (block * (cache.stride(0) // D) + within).unsqueeze(1) + heads
    return own, lines.view(-1), block[within == 0]


_write = register(
    "cache_rows(Tensor rows, Tensor? query_norm, Tensor? key_norm, Tensor? cos, Tensor? sin, Tensor positions, Tensor places, "
    "Tensor(a!) keys, Tensor(b!) values, Tensor? scales, float eps) -> Tensor",
    triton=_launch,
    cpu=_cpu,
    fake=lambda rows, qn, kn, cos, sin, positions, places, keys, values, scales, eps: rows.new_empty(
        rows.shape[0], rows.shape[1] // keys.shape[3] - 2 * keys.shape[1], keys.shape[3]
    ),
)


def cache_rows(
    rows: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    places: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: Tensor | None = None,
    *,
    eps: float = 1e-6,
    scratch: Scratch | None = None,
) -> Tensor:
    """Writes the keys and values of a step's rows to the cache and returns their queries [M, H, D]; no gradient.

    rows: [M, (H + 2K) D], queries, keys and values of each row; norms: [D] of heads, or None; cos and sin: float32 [positions, R / 2], R
    the rotated part of a head, or None; positions and places: int64 [M]; keys and values: [blocks, K, 64, D] of rows' dtype or uint8
    (fp8), contiguous within each block, changed in place. scales: float32 [2, K] of an fp8 cache, powers of two, of each head's
    keys and values: a stored value times its scale is the number. Defaults to 1. scratch: a step's, on a CPU.
    A CPU zeros the other values of a block whose first place is written.
    Raises ValueError for shapes and dtypes that do not fit.
    """
    _, K, block, D = keys.shape
    heads, rest = divmod(rows.shape[1], D)
    if rest or heads <= 2 * K or block != BLOCK or keys.shape != values.shape or keys.stride() != values.stride():
        raise ValueError(
            f"cache_rows: rows {tuple(rows.shape)} are no queries, keys and values for a cache of {tuple(keys.shape)}, [blocks, K, {BLOCK}, D]"
        )
    if keys.dtype not in (rows.dtype, torch.uint8) or keys.stride()[1:] != (BLOCK * D, D, 1):
        raise ValueError(f"cache_rows: keys {keys.dtype} {keys.stride()} do not fit rows of {rows.dtype}")
    if scales is not None and (keys.dtype != torch.uint8 or scales.shape != (2, K) or scales.dtype != torch.float32):
        raise ValueError(
            f"cache_rows: scales {scales.dtype} {tuple(scales.shape)} must be float32 [2, {K}], of a cache of bytes"
        )
    if (query_norm is None) != (key_norm is None) or (cos is None) != (sin is None):
        raise ValueError("cache_rows: norms of queries and keys, and cosines and sines, come together")
    tensors = (rows.contiguous(), query_norm, key_norm, cos, sin, positions, places, keys, values, scales)
    if use_reference():
        return cache_rows_reference(*tensors, eps=eps)
    if scratch is not None and is_plain_cpu(rows):
        return _written(*tensors, eps, scratch)
    return _write(*tensors, eps)


def cache_rows_reference(
    rows: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, cos: Tensor | None, sin: Tensor | None, positions: Tensor,
    places: Tensor, keys: Tensor, values: Tensor, scales: Tensor | None = None, *, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """The same in plain torch, float32 inside, one row at a time."""
    K, D = keys.shape[1], keys.shape[3]
    query, *pair = _turned(rows, query_norm, key_norm, cos, sin, positions, K=K, D=D, eps=eps)
    pair = _divided(pair, scales=scales)
    for m, place in enumerate(places.tolist()):
        for cache, part in zip((keys, values), pair, strict=True):
            if place >= 0:
                stored = to_fp8(part[m]) if cache.dtype == torch.uint8 else part[m].to(cache.dtype)
                cache[place // BLOCK, :, place % BLOCK] = stored
    return query.to(rows.dtype)


def _make_inputs(shape, *, dtype, device, norms=True, rotary=True, fp8=False, scaled=False) -> dict[str, object]:
    M, H, K, D = shape
    blocks, half = -(-M // BLOCK) + 1, max(1, 3 * D // 8) if rotary else 0
    angle = torch.randn(M + 5, half, device=device)
    places = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(blocks * BLOCK - 1) + 1])[
        :M
    ]  # the very first is one
    places[M // 2 :: 7] = -1
    store = torch.zeros(blocks, 2, K, BLOCK, D, dtype=torch.uint8 if fp8 else dtype, device=device)
    return {
        "rows": torch.randn(M, (H + 2 * K) * D, device=device).to(dtype),
        **{
            f"{name}_norm": (torch.rand(D, device=device) + 0.5).to(dtype) if norms else None
            for name in ("query", "key")
        },
        "cos": angle.cos() if rotary else None,
        "sin": angle.sin() if rotary else None,
        "positions": torch.randint(M + 5, (M,)).to(device),
        "places": places.to(device),
        "keys": store[:, 0],
        "values": store[:, 1],
        "scales": 2.0 ** torch.randint(-9, 2, (2, K), device=device).float() if scaled else None,
    }


SPEC = OpSpec(
    name="cache_rows",
    op=cache_rows,
    reference=cache_rows_reference,
    make_inputs=_make_inputs,
    mutated=("keys", "values"),
    small_shapes=((1, 1, 1, 16), (9, 4, 2, 24)),
    bench_shapes=((8192, 32, 8, 128),),
    variants=({}, {"norms": False}, {"rotary": False, "fp8": True}, {"fp8": True, "scaled": True}),
    num_bytes=lambda shape, itemsize: 2 * shape[0] * (shape[1] + 2 * shape[2]) * shape[3] * itemsize,
    num_flops=lambda shape: 10 * shape[0] * (shape[1] + shape[2]) * shape[3],
    interpreted_dtypes=(torch.float32, torch.bfloat16),
)
