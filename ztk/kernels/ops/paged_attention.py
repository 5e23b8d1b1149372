"""Attention over a cache of blocks of 64 positions, for rows of several sequences at once: decoding and prompts.

    out[m, h] = softmax(scale q[m, h] k[j, h // G] + slope[h] j) v[j, h // G]      over the keys j <= position of m, j > position - window

A tile is 64 query rows of one sequence and one key head: T positions, a multiple of T on, times the G query heads that share it. Keys
are read through the sequence's table, in blocks of 64; segments of 512 keys from position 0 on are summed separately and merged in order by
one formula. A program computes one segment, whose results a second kernel merges (decoding, with few tiles), or all of them (prompts). The
bits are the same and depend only on the position of a row. So does every product: its shape is fixed.
Masked keys add exactly nothing. Bytes: 2 K D per key of each sequence, read once per tile.

Flash-decoding: https://pytorch.org/blog/flash-decoding/; paged attention: Kwon et al., https://arxiv.org/abs/2309.06180
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.dependent import dependent_launch, wait_for_kernels
from ztk.kernels.launch.grids import cdiv, next_power_of_2
from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.library import is_plain_cpu, register, use_reference
from ztk.kernels.launch.machine import Architecture, Machine, machine
from ztk.kernels.launch.memory import Memory, maker, memory_of
from ztk.kernels.shared.cached_attention import BLOCK, Rows, Scratch, attend, planned
from ztk.kernels.shared.fp8 import decode_fp8, from_fp8, to_fp8
from ztk.kernels.shared.math import cast, dot
from ztk.kernels.shared.spec import OpSpec, compute_dtype

ROWS = 64  # query rows of a tile
WIDEST_IN_THREE = 128  # elements of a head up to which blocks are loaded in three stages
SEGMENT = 512  # keys that are summed before they are merged
TILE_COLUMNS = 5  # of `tiles`: row of the tables, first position, row of the step at that position, from and to which positions count
_BLOCK, _ROWS, _SEGMENT, _COLUMNS = (tl.constexpr(value) for value in (BLOCK, ROWS, SEGMENT, TILE_COLUMNS))
_LOG2_E = tl.constexpr(1.4426950408889634)


def positions_per_tile(group: int) -> int:
    """T, for `group` query heads per key head.

    Raises:
        ValueError: more than 64 heads share a key head.
    """
    if group > ROWS:
        raise ValueError(f"paged_attention: {group} query heads per key head; at most {ROWS}")
    return ROWS // next_power_of_2(group)


@triton.jit
def _merged(b_max, b_sum, b_acc, b_max2, b_sum2, b_acc2):
    """The two parts of a softmax as one: sums and accumulators rescaled to the larger maximum"""
    b_new = tl.maximum(b_max, b_max2)
    b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_scale = tl.exp2(b_max - b_safe)
    b_scale2 = tl.exp2(b_max2 - b_safe)
    b_acc = b_acc * b_scale[:, None] + b_acc2 * b_scale2[:, None]
    return b_new, b_sum * b_scale + b_sum2 * b_scale2, b_acc


@triton.jit
def _load_cache(p_x, mask, DTYPE: tl.constexpr):
    """A tile of keys or values; of fp8 a 256th"""
    b_x = tl.load(p_x, mask=mask, other=0)
    if p_x.dtype.element_ty == tl.uint8:
        return decode_fp8(b_x, True).to(DTYPE)
    else:
        return b_x


@triton.jit
def _segment(
    b_q, keys_ptr, values_ptr, table_ptr, b_slope, o_pos, first, last, stop, o_head, stride_block, scale, window, softcap,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
):  # fmt: skip
    """(maximum, sum, accumulator) of exp2(log2(e) scores - maximum) v over the blocks [first, last), in order"""
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    o_j = tl.arange(0, _BLOCK)
    b_max = tl.full([_ROWS], float("-inf"), tl.float32)
    b_sum = tl.zeros([_ROWS], tl.float32)
    b_acc = tl.zeros([_ROWS, BLOCK_D], tl.float32)
    block = tl.load(
        table_ptr + first
    )  # one round ahead: as an address from the same round it would hold back the keys of later rounds
    for i_b in range(first, last):
        o_block = block.to(tl.int64) * stride_block + o_head
        block = tl.load(table_ptr + tl.minimum(i_b + 1, last - 1))
        o_key = o_j + i_b * _BLOCK
        m_j = o_key < stop  # memory after the last key is undefined
        p_k = keys_ptr + o_block + o_j[None, :] * D + o_d[:, None]
        b_s = dot(b_q, _load_cache(p_k, m_d[:, None] & m_j[None, :], b_q.dtype), tl.zeros([_ROWS, _BLOCK], tl.float32))
        b_s = b_s * scale
        if HAS_CAP:
            b_s = softcap * (2.0 * tl.sigmoid(2.0 * (b_s / softcap)) - 1.0)
        if HAS_SLOPES:
            b_s += b_slope[:, None] * o_key.to(tl.float32)[None, :]
        m_s = o_key[None, :] <= o_pos[:, None]
        if HAS_WINDOW:
            m_s = m_s & (o_key[None, :] > o_pos[:, None] - window)
        b_s = tl.where(m_s, b_s * _LOG2_E, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s - b_safe[:, None])
        b_scale = tl.exp2(b_max - b_safe)
        b_sum = b_sum * b_scale + tl.sum(b_p, axis=1)
        p_v = values_ptr + o_block + o_j[:, None] * D + o_d[None, :]
        b_v = _load_cache(p_v, m_j[:, None] & m_d[None, :], b_q.dtype)
        b_acc = dot(cast(b_p, b_q.dtype), b_v, b_acc * b_scale[:, None])
        b_max = b_new
    return b_max, b_sum, b_acc


@triton.jit
def _store_rows(
    out_ptr, b_sum, b_acc, o_pos, first, row, start, stop, i_k, H, G, D, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
    factor,
):  # fmt: skip
    """out[row + position - first, head] = acc / sum for the positions in [start, stop); 0 at `row` for a tile of padding, whose stop is 0"""
    o_g = tl.arange(0, _ROWS) % GROUP
    o_d = tl.arange(0, BLOCK_D)
    m_r = (((o_pos >= start) & (o_pos < stop)) | ((o_pos == 0) & (o_pos >= stop))) & (o_g < G)
    o_row = (row + o_pos - first).to(tl.int64) * H + i_k * G + o_g
    p_out = out_ptr + o_row[:, None] * D + o_d[None, :]
    b_out = b_acc / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None] * factor
    tl.store(p_out, cast(b_out, out_ptr.dtype.element_ty), mask=m_r[:, None] & (o_d < D)[None, :])


@jit(do_not_specialize=["stride_table"])
def _paged_attention(
    query_ptr, keys_ptr, values_ptr, tables_ptr, tiles_ptr, slopes_ptr, scales_ptr, out_ptr, acc_ptr, stats_ptr, stride_block, stride_table,
    scale, window, softcap, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of queries and one key head: all segments in order, or segment i_s with its results in acc and stats"""
    wait_for_kernels(PDL)
    i_q = tl.program_id(0).to(tl.int64)
    i_k = tl.program_id(1).to(tl.int64)
    i_s = tl.program_id(2).to(tl.int64)
    sequence = tl.load(tiles_ptr + i_q * _COLUMNS).to(tl.int64)
    first = tl.load(tiles_ptr + i_q * _COLUMNS + 1)
    row = tl.load(tiles_ptr + i_q * _COLUMNS + 2)
    start = tl.load(tiles_ptr + i_q * _COLUMNS + 3)
    stop = tl.load(tiles_ptr + i_q * _COLUMNS + 4)
    o_r = tl.arange(0, _ROWS)
    o_g = o_r % GROUP
    o_d = tl.arange(0, BLOCK_D)
    o_pos = first + o_r // GROUP
    m_r = (o_pos >= start) & (o_pos < stop) & (o_g < G)
    p_q = query_ptr + ((row + o_pos - first).to(tl.int64) * H + i_k * G + o_g)[:, None] * D + o_d[None, :]
    b_q = tl.load(p_q, mask=m_r[:, None] & (o_d < D)[None, :], other=0.0)
    b_slope = tl.zeros([_ROWS], tl.float32)
    if slopes_ptr is not None:
        b_slope = tl.load(slopes_ptr + i_k * G + o_g, mask=o_g < G, other=0.0)
    table_ptr = tables_ptr + sequence * stride_table
    o_head = i_k * (_BLOCK * D)
    factor = 1.0
    if keys_ptr.dtype.element_ty == tl.uint8:
        scale *= 256.0  # factor missing from fp8 as loaded
        factor = 256.0
    if scales_ptr is not None:
        scale *= tl.load(scales_ptr + i_k)
        factor *= tl.load(scales_ptr + H // G + i_k)
    i_first = 0
    if HAS_WINDOW:
        i_first = tl.maximum(0, start - window + 1) // _BLOCK
    num_blocks = tl.cdiv(stop, _BLOCK)
    per_segment: tl.constexpr = _SEGMENT // _BLOCK
    if acc_ptr is not None:
        begin = i_s.to(tl.int32) * per_segment
        if begin < num_blocks:
            b_max, b_sum, b_acc = _segment(
                b_q, keys_ptr, values_ptr, table_ptr, b_slope, o_pos, tl.maximum(begin, i_first),
                tl.minimum(begin + per_segment, num_blocks), stop, o_head, stride_block, scale, window, softcap, D,
                BLOCK_D, HAS_WINDOW, HAS_CAP, slopes_ptr is not None,
            )  # fmt: skip
            o_part = ((i_q * tl.num_programs(1) + i_k) * tl.num_programs(2) + i_s) * _ROWS + o_r
            # `_merge_segments` reads no rows after these: 4 of 64 for one position of 4 heads.
            m_s = o_r < (stop - first) * GROUP
            tl.store(stats_ptr + o_part * 2, b_max, mask=m_s)
            tl.store(stats_ptr + o_part * 2 + 1, b_sum, mask=m_s)
            tl.store(acc_ptr + o_part[:, None] * BLOCK_D + o_d[None, :], b_acc, mask=m_s[:, None])
    else:
        b_max = tl.full([_ROWS], float("-inf"), tl.float32)
        b_sum = tl.zeros([_ROWS], tl.float32)
        b_acc = tl.zeros([_ROWS, BLOCK_D], tl.float32)
        for begin in range(i_first // per_segment * per_segment, num_blocks, per_segment):
            b_max2, b_sum2, b_acc2 = _segment(
                b_q, keys_ptr, values_ptr, table_ptr, b_slope, o_pos, tl.maximum(begin, i_first),
                tl.minimum(begin + per_segment, num_blocks), stop, o_head, stride_block, scale, window, softcap, D,
                BLOCK_D, HAS_WINDOW, HAS_CAP, slopes_ptr is not None,
            )  # fmt: skip
            b_max, b_sum, b_acc = _merged(b_max, b_sum, b_acc, b_max2, b_sum2, b_acc2)
        _store_rows(out_ptr, b_sum, b_acc, o_pos, first, row, start, stop, i_k, H, G, D, GROUP, BLOCK_D, factor)


@jit(do_not_specialize=["segments"])
def _merge_segments(
    acc_ptr, stats_ptr, tiles_ptr, scales_ptr, out_ptr, segments, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr, FACTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out of the segments of one tile and key head, merged in order"""
    wait_for_kernels(PDL)
    i_q = tl.program_id(0).to(tl.int64)
    i_k = tl.program_id(1).to(tl.int64)
    factor = FACTOR * 1.0
    if scales_ptr is not None:
        factor = FACTOR * tl.load(scales_ptr + H // G + i_k)
    first = tl.load(tiles_ptr + i_q * _COLUMNS + 1)
    row = tl.load(tiles_ptr + i_q * _COLUMNS + 2)
    start = tl.load(tiles_ptr + i_q * _COLUMNS + 3)
    stop = tl.load(tiles_ptr + i_q * _COLUMNS + 4)
    o_r = tl.arange(0, _ROWS)
    o_d = tl.arange(0, BLOCK_D)
    o_pos = first + o_r // GROUP
    m_r = (o_pos >= start) & (o_pos < stop) & (o_r % GROUP < G)
    b_max = tl.full([_ROWS], float("-inf"), tl.float32)
    b_sum = tl.zeros([_ROWS], tl.float32)
    b_acc = tl.zeros([_ROWS, BLOCK_D], tl.float32)
    for i_s in range(0, tl.cdiv(stop, _SEGMENT)):
        o_part = ((i_q * tl.num_programs(1) + i_k) * segments + i_s) * _ROWS + o_r
        b_max2 = tl.load(stats_ptr + o_part * 2, mask=m_r, other=float("-inf"))
        b_sum2 = tl.load(stats_ptr + o_part * 2 + 1, mask=m_r, other=0.0)
        b_acc2 = tl.load(acc_ptr + o_part[:, None] * BLOCK_D + o_d[None, :], mask=m_r[:, None], other=0.0)
        b_max, b_sum, b_acc = _merged(b_max, b_sum, b_acc, b_max2, b_sum2, b_acc2)
    _store_rows(out_ptr, b_sum, b_acc, o_pos, first, row, start, stop, i_k, H, G, D, GROUP, BLOCK_D, factor)


@kept
def _kernels_for(
    target: Machine, rows: int, H: int, D: int, dtype: torch.dtype, K: int, cache_dtype: torch.dtype, stride_block: int, stride_table: int,
    width: int, num_tiles: int, scale: float, window: int, softcap: float, split: bool,
) -> tuple[Bound, Memory, tuple[Bound, Memory, Memory] | None]:  # fmt: skip
    """The kernel of attention, the memory of its result, and, for more than one segment, the merging kernel and the memory of partial
    results.

    dtype: the queries' dtype; stride_block: the keys'; stride_table: the tables'; width: blocks of the longest sequence.
    """
    segments = cdiv(width * BLOCK, SEGMENT) if split else 1
    sizes = {"H": H, "G": H // K, "D": D, "GROUP": next_power_of_2(H // K), "BLOCK_D": max(16, next_power_of_2(D))}
    # The same warps in both forms, whose sums follow the layout; a fused multiply-add would round parts and all of them differently.
    options = {"num_warps": 8, "enable_fp_fusion": False, **dependent_launch(target)}
    # Three: two blocks of keys and values are on their way while one is multiplied. With two the next is asked for when the last product is
    # issued, and waited for at once. Two programs of 112 KiB fit on a processor; heads above 128 and A100's tiles have no room.
    stages = 1 if dtype.itemsize == 4 or target.architecture is Architecture.cdna else 2
    if stages == 2 and target.architecture is not Architecture.ampere and sizes["BLOCK_D"] <= WIDEST_IN_THREE:
        stages = 3
    attention = bind(
        _paged_attention, stride_block, stride_table, scale, window, softcap, grid=(num_tiles, K, segments), **sizes, HAS_WINDOW=window > 0,
        HAS_CAP=softcap > 0, num_stages=stages, **options,
    )  # fmt: skip
    out = memory_of(rows, H, D, dtype=dtype)
    if segments == 1:
        return attention, out, None
    factor, parts_rows = 256 if cache_dtype == torch.uint8 else 1, num_tiles * K * segments * ROWS
    merge = bind(_merge_segments, segments, grid=(num_tiles, K), **sizes, FACTOR=factor, **options)
    left = (memory_of(parts_rows, columns, dtype=torch.float32) for columns in (sizes["BLOCK_D"], 2))
    return attention, out, (merge, *left)


def _launch(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, tiles: Tensor, slopes: Tensor | None, scales: Tensor | None,
    scale: float, window: int, softcap: float, split: bool,
) -> Tensor:  # fmt: skip
    (rows, H, D), num_tiles = query.shape, tiles.shape[0]
    parts, like_query, merging = _kernels_for(
        machine(query.device), rows, H, D, query.dtype, keys.shape[1], keys.dtype, keys.stride()[0], tables.stride()[0], tables.shape[1],
        num_tiles, scale, window, softcap, split,
    )  # fmt: skip
    make = maker(query)
    out = make(*like_query)
    if not rows or not num_tiles:
        return out
    if merging is None:
        parts.launch(query, keys, values, tables, tiles, slopes, scales, out, None, None)
        return out
    merge, per_part, per_row = merging
    acc, stats = make(*per_part), make(*per_row)
    parts.launch(query, keys, values, tables, tiles, slopes, scales, out, acc, stats)
    merge.launch(acc, stats, tiles, scales, out)
    return out


def _cpu(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, tiles: Tensor, slopes: Tensor | None, scales: Tensor | None,
    scale: float, window: int, softcap: float, split: bool,
) -> Tensor:  # fmt: skip
    return _attended(query, keys, values, tables, tiles, slopes, scales, scale, window, softcap, Scratch())


def _attended(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, tiles: Tensor, slopes: Tensor | None, scales: Tensor | None,
    scale: float, window: int, softcap: float, scratch: Scratch,
) -> Tensor:  # fmt: skip
    """In float32, over the runs of blocks of the cache; of another dtype or layout, over copies of the blocks that are read."""
    (_, H, D), K = query.shape, keys.shape[1]
    sizes = {"kv_heads": K, "group": H // K, "head_dim": D}
    rows, padding, used = scratch.once("rows", make=lambda: _rows_of(tiles, tables=tables))
    total, attending = len(keys), scratch
    if keys.dtype != torch.float32 or not keys.is_contiguous():
        places = torch.tensor(used, dtype=torch.int64, device=keys.device)
        keys, values = (_widened(cache, at=places, scales=scales, part=n) for n, cache in enumerate((keys, values)))
        numbers, total = {block: number for number, block in enumerate(used)}, len(used)
        rows = [own._replace(blocks=tuple(numbers[block] for block in own.blocks)) for own in rows]
        attending = Scratch()  # of copies that no other call reads
    groups = scratch.once("tiles", make=lambda: planned(rows, total=total, **sizes))
    options = {
        "scale": scale,
        "window": window or None,
        "softcap": softcap or None,
        "slopes": slopes,
        "scratch": attending,
    }
    wide = query.float()
    if len(groups) == 1 and groups[0].sources is None and not padding and len(query) == groups[0].count:
        return attend(wide, tiles=groups[0], keys=keys, values=values, **options).to(query.dtype)
    out = torch.empty_like(query)
    for own in groups:
        out[own.targets] = attend(wide, tiles=own, keys=keys, values=values, **options).to(query.dtype)
    if padding:
        out[padding] = 0
    return out


def _rows_of(tiles: Tensor, *, tables: Tensor) -> tuple[list[Rows], list[int], list[int]]:
    """The rows of each sequence, rows of padding, and all blocks that are read, rising."""
    found: dict[int, Rows] = {}
    padding = []
    for sequence, first, row, start, stop in tiles.tolist():
        if not stop:
            padding.append(row)
        elif sequence in found and found[sequence].start + found[sequence].length == start:
            own = found[sequence]
            found[sequence] = own._replace(length=stop - own.start)
        else:
            found[sequence] = Rows(blocks=(), start=start, length=stop - start, row=row + start - first)
    lists = tables[list(found)].tolist()
    rows = [
        own._replace(blocks=tuple(blocks[: cdiv(own.start + own.length, BLOCK)]))
        for own, blocks in zip(found.values(), lists, strict=True)
    ]
    return rows, padding, sorted({block for own in rows for block in own.blocks})


def _widened(cache: Tensor, *, at: Tensor, scales: Tensor | None, part: int) -> Tensor:
    """float32 copies [N, K, 64, D] of these blocks, zero where they are not finite. part: 0 of keys, 1 of values."""
    blocks = cache.index_select(0, at)
    wide = from_fp8(blocks) if cache.dtype == torch.uint8 else blocks.float()
    wide = wide if scales is None else wide * scales[part].view(-1, 1, 1)
    return wide.nan_to_num_(0.0, posinf=0.0, neginf=0.0)


_attend = register(
    "paged_attention(Tensor query, Tensor keys, Tensor values, Tensor tables, Tensor tiles, Tensor? slopes, Tensor? scales, "
    "float scale, int window, float softcap, bool split) -> Tensor",
    triton=_launch,
    cpu=_cpu,
    fake=lambda query, *rest: torch.empty_like(query),
)


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    tiles: Tensor,
    slopes: Tensor | None = None,
    scales: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    split: bool = False,
    scratch: Scratch | None = None,
) -> Tensor:
    """Attention of the step's rows over their sequences' blocks; no gradient.

    query: [M, H, D]; keys and values: [blocks, K, 64, D] of its dtype or uint8 (fp8), contiguous within each block, including the
    step's rows; tables: int32 [sequences, blocks of the longest], rows with any stride; tiles: int32 [Q, 5], each `positions_per_tile`
    positions of one sequence: row of the tables, first position (a multiple of `positions_per_tile`), the step's row of that position, first
    position that counts and one past the last; (0, 0, row, 0, 0) for padding, whose row is zero.
    slopes: float32 [H] of ALiBi. scales: float32 [2, K] of an fp8 cache, as in `cache_rows`; defaults to 1. window: keys that a query
    attends to, including itself; 0 for all. softcap: c tanh(score / c); 0 for none. split: a program per segment of 512 keys; it changes no
    bit. scratch: memory of a step on a CPU, whose layers share the plan of its products; the cache is then finite everywhere.
    Returns [M, H, D]; rows in no tile are undefined. Raises ValueError for shapes and dtypes that do not fit.
    """
    (_, H, D), (_, K, block, size) = query.shape, keys.shape
    if block != BLOCK or size != D or H % K or keys.shape != values.shape or keys.stride() != values.stride():
        raise ValueError(
            f"paged_attention: query {tuple(query.shape)} needs keys and values [blocks, K, {BLOCK}, {D}], not {tuple(keys.shape)}"
        )
    if (
        keys.stride()[1:] != (BLOCK * D, D, 1)
        or keys.dtype not in (query.dtype, torch.uint8)
        or keys.dtype != values.dtype
    ):
        raise ValueError(f"paged_attention: keys {keys.dtype} {keys.stride()} do not fit a query of {query.dtype}")
    if tiles.shape[1:] != (TILE_COLUMNS,) or tiles.dtype != torch.int32 or tables.dtype != torch.int32:
        raise ValueError(f"paged_attention: tiles {tuple(tiles.shape)} {tiles.dtype} must be int32 [Q, {TILE_COLUMNS}]")
    if scales is not None and (keys.dtype != torch.uint8 or scales.shape != (2, K) or scales.dtype != torch.float32):
        raise ValueError(
            f"paged_attention: scales {scales.dtype} {tuple(scales.shape)} must be float32 [2, {K}], of a cache of bytes"
        )
    positions_per_tile(H // K)
    tables = tables if tables.stride(1) == 1 else tables.contiguous()
    tensors = (query.contiguous(), keys, values, tables, tiles.contiguous(), slopes, scales)
    if use_reference():
        return paged_attention_reference(*tensors, scale=scale, window=window, softcap=softcap)
    if scratch is not None and is_plain_cpu(query):
        return _attended(*tensors, scale, window, softcap, scratch)
    return _attend(*tensors, scale, window, softcap, split)


def paged_attention_reference(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, tiles: Tensor, slopes: Tensor | None = None,
    scales: Tensor | None = None, *, scale: float, window: int = 0, softcap: float = 0.0, split: bool = False,
) -> Tensor:  # fmt: skip
    """One row at a time over all its keys, in float32; rows in no tile are zero."""
    H, K, dtype = query.shape[1], keys.shape[1], compute_dtype(query)
    out = torch.zeros_like(query)
    wide = [(from_fp8(cache) if cache.dtype == torch.uint8 else cache).to(dtype) for cache in (keys, values)]
    if scales is not None:
        wide = [cache * own.to(dtype).view(-1, 1, 1) for cache, own in zip(wide, scales, strict=True)]
    for sequence, first, row, start, stop in tiles.tolist():
        own = [cache[tables[sequence].long()].transpose(1, 2).flatten(0, 1) for cache in wide]  # [positions, K, D]
        for position in range(start, stop):
            low = max(0, position + 1 - window) if window else 0
            k, v = (part[low : position + 1].repeat_interleave(H // K, dim=1) for part in own)
            scores = torch.einsum("hd,jhd->hj", query[row + position - first].to(dtype), k) * scale
            scores = torch.tanh(scores / softcap) * softcap if softcap else scores
            if slopes is not None:
                scores = scores + slopes.to(dtype)[:, None] * torch.arange(low, position + 1, device=out.device)
            out[row + position - first] = torch.einsum("hj,jhd->hd", scores.softmax(-1), v).to(query.dtype)
    return out


def make_tiles(spans: list[tuple[int, int, int, int]], *, group: int) -> list[list[int]]:
    """The tiles of (row of the tables, first position, positions, first row of the step) each: rows [Q, 5] of integers."""
    T, tiles = positions_per_tile(group), []
    for sequence, start, count, row in spans:
        stop = start + count
        for first in range(start // T * T, stop, T):
            tiles.append([sequence, first, row + first - start, max(first, start), min(first + T, stop)])
    return tiles


def _make_inputs(shape, *, dtype, device, rows=1, fp8=False, alibi=False, scaled=False, **options) -> dict[str, object]:
    sequences, longest, H, K, D = shape
    lengths = [max(rows, longest - 37 * number) for number in range(sequences)]
    blocks = [-(-length // BLOCK) for length in lengths]
    tables, order = torch.zeros(sequences, max(blocks) + 3, dtype=torch.int32), torch.randperm(sum(blocks)).int()
    for number, count in enumerate(blocks):
        tables[number, :count] = order[sum(blocks[:number]) :][:count]
    spans = [(number, length - rows, rows, number * rows) for number, length in enumerate(lengths)]
    store = torch.randn(sum(blocks), 2, K, BLOCK, D, device=device)
    store = to_fp8(store) if fp8 else store.to(dtype)
    tiles = [*make_tiles(spans, group=H // K), [0, 0, sequences * rows, 0, 0]]
    return {
        "query": torch.randn(sequences * rows + 1, H, D, device=device).to(dtype),
        "keys": store[:, 0],
        "values": store[:, 1],
        "tables": tables.to(device)[:, : max(blocks)],
        "tiles": torch.tensor(tiles, dtype=torch.int32).to(device),
        "slopes": (2.0 ** -torch.arange(4, H + 4).float()).to(device) if alibi else None,
        "scales": 2.0 ** torch.randint(-2, 2, (2, K), device=device).float() if scaled else None,
        "scale": D**-0.5,
        **options,
    }


SPEC = OpSpec(
    name="paged_attention",
    op=paged_attention,
    reference=paged_attention_reference,
    make_inputs=_make_inputs,
    small_shapes=((1, 5, 2, 1, 16), (2, 600, 6, 2, 24)),
    bench_shapes=((1, 65536, 32, 8, 128), (64, 8192, 32, 8, 128)),
    variants=(
        {"split": True},
        {"rows": 5, "window": 70, "softcap": 3.0},
        {"rows": 5, "fp8": True, "alibi": True, "scaled": True},
        {"fp8": True, "split": True, "scaled": True},
    ),
    num_bytes=lambda shape, itemsize: 2 * shape[0] * shape[1] * shape[3] * shape[4] * itemsize,
    num_flops=lambda shape: 4 * shape[0] * shape[1] * shape[2] * shape[4],
    interpreted_dtypes=(torch.float32, torch.bfloat16),
    tolerance_ulps=8.0,  # of float32: scores up to 20, whose rounding exp amplifies
)
