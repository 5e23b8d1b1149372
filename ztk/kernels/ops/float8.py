"""Matrices in float8 with a scale per row, per column, or both, for products of float8 in training.

    largest[v] = max |x| over a row or column v        scale[v] = 2^ceil(log2(largest[v] / Q))        code = x / scale
    Q = 448 (e4m3) or 57,344 (e5m2)

A product sums over the last dimension of both matrices, so codes by columns are stored transposed. With a factor, rows are of x with
each column multiplied by that column's scale. Traffic of `float8_largest` is one read of x. `float8_codes` reads x once more and writes both
forms. Both maxima of a matrix need all of it, so one pass fewer is impossible. [Note: Float8 numerics] has the reasons for the scales.

Maxima of tiles meet by atomics. A maximum is the same in every order, and so are the bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.grids import cdiv
from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.library import register, use_reference
from ztk.kernels.launch.machine import Architecture, Machine, machine
from ztk.kernels.launch.memory import Memory, maker, memory_of
from ztk.kernels.shared.fp8 import encode_e5m2, encode_fp8
from ztk.kernels.shared.math import INTERPRETED
from ztk.kernels.shared.spec import OpSpec

# A row of a tile is 128 bytes of 16-bit elements, and its transpose stores 128 bytes of codes. With 64 elements a thread has 128 bytes in
# flight, and spends 6 to 15 instructions on an element: with 32 up to 24, for which an H200 would need as long as for the bytes.
BLOCK_R, BLOCK_C, NUM_WARPS = 128, 64, 4
MULTIPLE = 16  # of which a product's inner and outer size must be on NVIDIA's GPUs
SMALLEST = 2.0**-100  # scale
_LEAST = tl.constexpr((127 - 100) << 23)  # its bits
_MANTISSA = 23  # bits of float32
_DTYPES = (torch.bfloat16, torch.float32)
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def _rows(p_x, o_r, o_c, R, C, stride):
    """x as float32 [rows, columns], zero outside; p_x: the tile's first element, and R and C count from there"""
    m_x = (o_r < R)[:, None] & (o_c < C)[None, :]
    return tl.load(p_x + o_r[:, None] * stride + o_c[None, :], mask=m_x, other=0.0).to(tl.float32)


@triton.jit
def _magnitude(b_x):
    """|x| as an integer: inf and nan order above every finite value"""
    return b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(b_largest, WIDE: tl.constexpr):
    """2^ceil(log2(largest / Q)) and its inverse, float32; both NaN if largest is not finite"""
    # Q is 1.75 * 2^8 or 1.75 * 2^15. A mantissa above 1.75 takes the next power.
    Q: tl.constexpr = 15 << 23 if WIDE else 8 << 23
    b_bits = b_largest.to(tl.int32, bitcast=True)
    b_power = tl.maximum((((b_bits + 0x1FFFFF) >> 23) << 23) - Q, _LEAST)
    is_finite = b_bits < 0x7F800000
    b_scale = tl.where(is_finite, b_power, 0x7FC00000).to(tl.float32, bitcast=True)
    return b_scale, tl.where(is_finite, 0x7F000000 - b_power, 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def _codes(b_x, WIDE: tl.constexpr, CONVERTS: tl.constexpr):
    """Bytes of float32 b_x, at most Q, rounded to nearest even"""
    if CONVERTS and not INTERPRETED:
        b_code = (b_x.to(tl.float8e5) if WIDE else b_x.to(tl.float8e4nv)).to(tl.uint8, bitcast=True)
    elif WIDE:
        b_code = encode_e5m2(b_x)
    else:
        b_code = encode_fp8(b_x)
    return b_code


@triton.jit
def _four_codes(b_0, b_1, b_2, b_3, WIDE: tl.constexpr, CONVERTS: tl.constexpr):
    """The codes of four tiles as the bytes of int32, the first lowest"""
    if CONVERTS and not INTERPRETED:
        TO: tl.constexpr = "cvt.rn.satfinite.e5m2x2.f32" if WIDE else "cvt.rn.satfinite.e4m3x2.f32"
        ASM: tl.constexpr = (
            "{ .reg .b16 low, high; " + TO + " low, $2, $1; " + TO + " high, $4, $3; mov.b32 $0, {low, high}; }"
        )
        b_four = tl.inline_asm_elementwise(
            ASM, "=r,f,f,f,f", [b_0, b_1, b_2, b_3], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        b_four = _codes(b_0, WIDE, CONVERTS).to(tl.int32) | (_codes(b_1, WIDE, CONVERTS).to(tl.int32) << 8)
        b_four |= (_codes(b_2, WIDE, CONVERTS).to(tl.int32) << 16) | (_codes(b_3, WIDE, CONVERTS).to(tl.int32) << 24)
    return b_four


@jit
def _float8_largest(
    x_ptr, factor_ptr, rows_ptr, columns_ptr, R, C, stride, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """rows = max(rows, |x * scale(factor)| of each row), columns = max(columns, |x| of each column), as integers"""
    i_r, i_c = tl.program_id(0).to(tl.int64) * BLOCK_R, tl.program_id(1).to(tl.int64) * BLOCK_C
    o_r, o_c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    R, C = (R - i_r).to(tl.int32), (C - i_c).to(tl.int32)  # from this tile on
    b_x = _rows(x_ptr + i_r * stride + i_c, o_r, o_c, R, C, stride)
    if columns_ptr is not None:
        tl.atomic_max(columns_ptr + i_c + o_c, tl.max(_magnitude(b_x), axis=0), mask=o_c < C, sem="relaxed")
    if rows_ptr is not None:
        if factor_ptr is not None:
            b_factor, _ = _scale(tl.load(factor_ptr + i_c + o_c, mask=o_c < C, other=0.0), False)
            b_x *= b_factor[None, :]
        tl.atomic_max(rows_ptr + i_r + o_r, tl.max(_magnitude(b_x), axis=1), mask=o_r < R, sem="relaxed")


@triton.jit
def _scaled_row(b_x, p_of, p_scales, p_codes, is_first, o_r, o_c, R, C, stride, TURNED: tl.constexpr, WIDE: tl.constexpr,
                CONVERTS: tl.constexpr):  # fmt: skip
    """b_x over the scales of its rows, which are stored, and so are the codes unless TURNED"""
    m_r = o_r < R
    b_scale, b_inverse = _scale(tl.load(p_of + o_r, mask=m_r, other=0.0), WIDE)
    if is_first:
        tl.store(p_scales + o_r, b_scale, mask=m_r)
    b_x *= b_inverse[:, None]
    if not TURNED:
        m_x = m_r[:, None] & (o_c < C)[None, :]
        tl.store(p_codes + o_r[:, None] * stride + o_c[None, :], _codes(b_x, WIDE, CONVERTS), mask=m_x)
    return b_x


@triton.jit
def _store_turned(
    p_codes, b_0, b_1, b_2, b_3, o_four, o_c, R, C, words, stride, WIDE: tl.constexpr, CONVERTS: tl.constexpr
):
    """The codes of rows 4 o_four and the three after each, as words of columns; zero from row R on. stride: words of a column"""
    b_four = tl.trans(_four_codes(b_0, b_1, b_2, b_3, WIDE, CONVERTS))
    # A vector of NaN has them in rows that do not exist, too.
    b_left = tl.minimum(tl.maximum(R - 4 * o_four, 0), 4)
    b_kept = tl.where(b_left == 4, -1, (1 << (8 * tl.minimum(b_left, 3))) - 1)
    p_four = p_codes + o_c[:, None] * stride + o_four[None, :]
    tl.store(p_four, b_four & b_kept[None, :], mask=(o_c < C)[:, None] & (o_four < words)[None, :])


@jit
def _float8_codes(
    x_ptr, factor_ptr, of_rows_ptr, of_columns_ptr, rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr, R, C, stride, words,
    TURNED: tl.constexpr, WIDE: tl.constexpr, CONVERTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """codes = x / scale by rows, [R, C] or with TURNED [C, 4 words], and by columns, [C, 4 words]; scale = 2^ceil(log2(largest / Q))"""
    # A thread has four neighbouring rows, so that transposing moves their codes as one word.
    i_r, i_c = tl.program_id(0).to(tl.int64) * BLOCK_R, tl.program_id(1).to(tl.int64) * BLOCK_C
    o_four, o_c = tl.arange(0, BLOCK_R // 4), tl.arange(0, BLOCK_C)
    words = tl.multiple_of(words, 4)
    row_codes = C
    o_turned = i_c * words + i_r // 4
    R, C = (R - i_r).to(tl.int32), (C - i_c).to(tl.int32)  # from this tile on
    left = (words - i_r // 4).to(tl.int32)
    o_r, m_c = 4 * o_four, o_c < C
    x_ptr += i_r * stride + i_c
    b_0 = _rows(x_ptr, o_r, o_c, R, C, stride)
    b_1 = _rows(x_ptr, o_r + 1, o_c, R, C, stride)
    b_2 = _rows(x_ptr, o_r + 2, o_c, R, C, stride)
    b_3 = _rows(x_ptr, o_r + 3, o_c, R, C, stride)
    if of_columns_ptr is not None:
        b_scale, b_inverse = _scale(tl.load(of_columns_ptr + i_c + o_c, mask=m_c, other=0.0), WIDE)
        if i_r == 0:
            tl.store(column_scales_ptr + i_c + o_c, b_scale, mask=m_c)
        b_i = b_inverse[None, :]
        p_columns = columns_ptr + o_turned
        _store_turned(
            p_columns, b_0 * b_i, b_1 * b_i, b_2 * b_i, b_3 * b_i, o_four, o_c, R, C, left, words, WIDE, CONVERTS
        )
    if of_rows_ptr is not None:
        if factor_ptr is not None:
            b_factor, _ = _scale(tl.load(factor_ptr + i_c + o_c, mask=m_c, other=0.0), False)
            b_f = b_factor[None, :]
            b_0, b_1, b_2, b_3 = b_0 * b_f, b_1 * b_f, b_2 * b_f, b_3 * b_f
        p_of, p_scales = of_rows_ptr + i_r, row_scales_ptr + i_r
        p_rows = rows_ptr + (o_turned if TURNED else i_r * row_codes + i_c)
        b_0 = _scaled_row(b_0, p_of, p_scales, p_rows, i_c == 0, o_r, o_c, R, C, row_codes, TURNED, WIDE, CONVERTS)
        b_1 = _scaled_row(b_1, p_of, p_scales, p_rows, i_c == 0, o_r + 1, o_c, R, C, row_codes, TURNED, WIDE, CONVERTS)
        b_2 = _scaled_row(b_2, p_of, p_scales, p_rows, i_c == 0, o_r + 2, o_c, R, C, row_codes, TURNED, WIDE, CONVERTS)
        b_3 = _scaled_row(b_3, p_of, p_scales, p_rows, i_c == 0, o_r + 3, o_c, R, C, row_codes, TURNED, WIDE, CONVERTS)
        if TURNED:
            _store_turned(p_rows, b_0, b_1, b_2, b_3, o_four, o_c, R, C, left, words, WIDE, CONVERTS)


def _padded(rows: int) -> int:
    return cdiv(rows, MULTIPLE) * MULTIPLE


@kept
def _largest_for(target: Machine, R: int, C: int, stride: int) -> Bound:
    return bind(
        _float8_largest, R, C, stride, grid=(cdiv(R, BLOCK_R), cdiv(C, BLOCK_C)), BLOCK_R=BLOCK_R, BLOCK_C=BLOCK_C,
        num_warps=NUM_WARPS * 32 // target.warp_size, enable_fp_fusion=True,
    )  # fmt: skip


def _launch_largest(x: Tensor, factor: Tensor | None, rows: bool, columns: bool) -> Tensor:
    R, C = x.shape
    of_rows = R if rows else 0
    found = torch.zeros(of_rows + (C if columns else 0), dtype=torch.int32, device=x.device)
    if x.numel() and found.numel():
        parts = found[:of_rows] if rows else None, found[of_rows:] if columns else None
        _largest_for(machine(x.device), R, C, x.stride(0)).launch(x, factor, *parts)
    return found.view(torch.float32)


@kept
def _codes_for(
    target: Machine, R: int, C: int, stride: int, by_rows: bool, by_columns: bool, turned: bool, dtype: torch.dtype
) -> tuple[Bound, tuple[Memory, ...]]:
    """With the memory of the results."""
    bound = bind(
        _float8_codes, R, C, stride, _padded(R) // 4, grid=(cdiv(R, BLOCK_R), cdiv(C, BLOCK_C)), TURNED=turned, WIDE=dtype is _CODES[1],
        CONVERTS=target.architecture in (Architecture.hopper, Architecture.blackwell), BLOCK_R=BLOCK_R, BLOCK_C=BLOCK_C,
        num_warps=NUM_WARPS * 32 // target.warp_size, enable_fp_fusion=True,
    )  # fmt: skip
    shapes = _shapes(R, C, by_rows=by_rows, by_columns=by_columns, turned=turned)
    kinds = torch.uint8, torch.float32, torch.uint8, torch.float32
    return bound, tuple(memory_of(*shape, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True))


def _shapes(R: int, C: int, *, by_rows: bool, by_columns: bool, turned: bool) -> tuple[tuple[int, ...], ...]:
    """Of codes and scales by rows, then by columns; (0,) where there are none."""
    rows = ((C, _padded(R)) if turned else (R, C), (R, 1)) if by_rows else ((0,), (0,))
    return *rows, *(((C, _padded(R)), (C, 1)) if by_columns else ((0,), (0,)))


def _launch_codes(
    x: Tensor,
    factor: Tensor | None,
    of_rows: Tensor | None,
    of_columns: Tensor | None,
    turned: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    forms = of_rows is not None, of_columns is not None
    bound, memory = _codes_for(machine(x.device), *x.shape, x.stride(0), *forms, turned, dtype)
    rows, row_scales, columns, column_scales = (maker(x)(*each) for each in memory)
    if x.numel() and any(forms):
        words = rows.view(torch.int32) if turned else rows, columns.view(torch.int32)
        bound.launch(x, factor, of_rows, of_columns, words[0], row_scales, words[1], column_scales)
    return rows.view(dtype), row_scales, columns.view(dtype), column_scales


def _cpu_largest(x: Tensor, factor: Tensor | None, rows: bool, columns: bool) -> Tensor:
    R, C = x.shape
    found = x.new_zeros((R if rows else 0) + (C if columns else 0), dtype=torch.float32)
    if x.numel() and rows:
        scaled = x if factor is None else x * _scales(factor, dtype=_CODES[0]).to(x.dtype)
        found[:R] = torch.linalg.vector_norm(scaled, ord=float("inf"), dim=1)
    if x.numel() and columns:
        found[-C:] = torch.linalg.vector_norm(x, ord=float("inf"), dim=0)
    return found


def _scales(largest: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Powers of two, float32 of the same shape."""
    bits = (largest / torch.finfo(dtype).max).clamp_(min=SMALLEST).view(torch.int32)
    rounded = (((bits + ((1 << _MANTISSA) - 1)) >> _MANTISSA) << _MANTISSA).view(torch.float32)
    return torch.where(largest.isfinite(), rounded, float("nan"))


def _cpu_codes(
    x: Tensor,
    factor: Tensor | None,
    of_rows: Tensor | None,
    of_columns: Tensor | None,
    turned: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    none = x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=torch.float32)
    rows = columns = none
    if of_columns is not None:
        scales = _scales(of_columns, dtype=dtype)
        columns = _turned(_encoded(x, scales=scales, dtype=dtype)), scales[:, None]
    if of_rows is not None:
        scales = _scales(of_rows, dtype=dtype)[:, None]
        scaled = x if factor is None else x * _scales(factor, dtype=_CODES[0]).to(x.dtype)
        codes = _encoded(scaled, scales=scales, dtype=dtype)
        rows = _turned(codes) if turned else codes, scales
    return rows[0].view(dtype), rows[1], columns[0].view(dtype), columns[1]


def _turned(codes: Tensor) -> Tensor:
    """uint8 [R, C] -> [C, R padded with zeros]."""
    R, C = codes.shape
    turned = codes.new_zeros(C, _padded(R))
    turned[:, :R].copy_(codes.t())
    return turned


def _encoded(x: Tensor, *, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes of the codes."""
    return (x * scales.reciprocal().to(x.dtype)).to(dtype).view(torch.uint8)


def _fake_codes(x, factor, of_rows, of_columns, turned, dtype):
    shapes = _shapes(*x.shape, by_rows=of_rows is not None, by_columns=of_columns is not None, turned=turned)
    return tuple(
        x.new_empty(shape, dtype=kind)
        for shape, kind in zip(shapes, (dtype, torch.float32, dtype, torch.float32), strict=True)
    )


_largest = register(
    "float8_largest(Tensor x, Tensor? factor, bool rows, bool columns) -> Tensor",
    triton=_launch_largest,
    cpu=_cpu_largest,
    fake=lambda x, factor, rows, columns: x.new_empty(
        (x.shape[0] if rows else 0) + (x.shape[1] if columns else 0), dtype=torch.float32
    ),
)
_both = register(
    "float8_codes(Tensor x, Tensor? factor, Tensor? of_rows, Tensor? of_columns, bool turned, ScalarType dtype) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    triton=_launch_codes,
    cpu=_cpu_codes,
    fake=_fake_codes,
)


def _checked(name: str, x: Tensor) -> Tensor:
    """x with dense rows."""
    if x.dim() != 2 or x.dtype not in _DTYPES:
        raise ValueError(f"{name}: x is {tuple(x.shape)} {x.dtype}; pass bfloat16 or float32 [R, C]")
    return x if x.stride(1) == 1 else x.contiguous()


def _check_vector(name: str, vector: Tensor | None, *, of: str, size: int) -> None:
    if vector is not None and (vector.shape != (size,) or vector.dtype != torch.float32 or not vector.is_contiguous()):
        raise ValueError(f"{name}: {of} is {tuple(vector.shape)} {vector.dtype}; pass contiguous float32 [{size}]")


def float8_largest(
    x: Tensor, factor: Tensor | None = None, *, rows: bool = True, columns: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the largest magnitudes of rows, float32 [R], and of columns, [C], of `x` [R, C], in one read; None for those not asked for.

    x: bfloat16 or float32. factor: largest magnitudes [C]; the rows' maxima are of x with each column multiplied by the e4m3 scale of its
    magnitude. An infinity or NaN gives an infinity or NaN. No gradient. Raises ValueError for other shapes and dtypes.
    """
    x = _checked("float8_largest", x)
    _check_vector("float8_largest", factor, of="factor", size=x.shape[1])
    found = (_cpu_largest if use_reference() else _largest)(x, factor, rows, columns)
    of_rows = x.shape[0] if rows else 0
    return found[:of_rows] if rows else None, found[of_rows:] if columns else None


def float8_codes(
    x: Tensor,
    factor: Tensor | None = None,
    of_rows: Tensor | None = None,
    of_columns: Tensor | None = None,
    *,
    turned: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns codes by rows [R, C] with scales [R, 1], and codes by columns [C, P] with scales [C, 1], of `x` [R, C], in one read.

    x: bfloat16 or float32. of_rows, of_columns: results of `float8_largest`; a form without them is empty, [0]. factor: the argument that
    `float8_largest` had for these rows. turned: codes by rows are stored as [C, P]. P is R rounded up to a multiple of 16, with codes of zero.
    dtype: float8_e4m3fn or float8_e5m2; scales are float32. The scale and the codes of a vector with an infinity or NaN are NaN. No gradient.
    Raises ValueError for other shapes and dtypes.
    """
    x = _checked("float8_codes", x)
    if dtype not in _CODES:
        raise ValueError(f"float8_codes: dtype={dtype} is no format of codes; choose {_CODES[0]} or {_CODES[1]}")
    sizes = {"factor": (factor, x.shape[1]), "of_rows": (of_rows, x.shape[0]), "of_columns": (of_columns, x.shape[1])}
    for name, (vector, size) in sizes.items():
        _check_vector("float8_codes", vector, of=name, size=size)
    return (_cpu_codes if use_reference() else _both)(x, factor, of_rows, of_columns, turned, dtype)


def _largest_reference(
    x: Tensor, factor: Tensor | None = None, *, rows: bool = True, columns: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """The same in plain torch."""
    found = _cpu_largest(x, factor, rows, columns)
    return found[: len(x)] if rows else None, found[len(x) if rows else 0 :] if columns else None


def _bytes_of(*results: Tensor) -> tuple[Tensor, ...]:
    """Codes as the numbers of their bytes, float32, so that tests compare them exactly."""
    return tuple(each.view(torch.uint8).float() if each.dtype in _CODES else each for each in results)


def _codes_as_bytes(x: Tensor, **options: object) -> tuple[Tensor, ...]:
    return _bytes_of(*float8_codes(x, **options))


def _codes_reference(
    x: Tensor,
    factor: Tensor | None = None,
    of_rows: Tensor | None = None,
    of_columns: Tensor | None = None,
    *,
    turned: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Tensor, ...]:
    """The same in plain torch."""
    return _bytes_of(*_cpu_codes(x, factor, of_rows, of_columns, turned, dtype))


def _make_matrix(shape: tuple[int, ...], *, dtype: torch.dtype, device: str) -> Tensor:
    """Rows and columns of many sizes, one row of zeros, and numbers that are exactly the largest code."""
    R, C = shape
    x = torch.randn(R, C, device=device) * torch.logspace(-9, 9, R, device=device)[:, None]
    x *= torch.logspace(-6, 0, C, device=device)
    x[R // 2], x[:, C // 2] = 0.0, -448.0 * 2.0**-7
    return x.to(dtype)


def _make_largest(
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype,
    device: str,
    factor: bool = False,
    rows: bool = True,
    columns: bool = True,
) -> dict:
    x = _make_matrix(shape, dtype=dtype, device=device)
    return {"x": x, "factor": x.float().abs().amax(0) if factor else None, "rows": rows, "columns": columns}


def _make_codes(
    shape: tuple[int, ...], *, dtype: torch.dtype, device: str, factor: bool = False, rows: bool = True, columns: bool = True,
    turned: bool = False, codes: torch.dtype = torch.float8_e4m3fn,
) -> dict:  # fmt: skip
    x = _make_matrix(shape, dtype=dtype, device=device)
    by = x.float().abs().amax(0) if factor else None
    of_rows, of_columns = _largest_reference(x, by, rows=rows, columns=columns)
    return {"x": x, "factor": by, "of_rows": of_rows, "of_columns": of_columns, "turned": turned, "dtype": codes}


LARGEST_SPEC = OpSpec(
    name="float8_largest",
    op=float8_largest,
    reference=_largest_reference,
    make_inputs=_make_largest,
    dtypes=(torch.float32, torch.bfloat16),
    interpreted_dtypes=(torch.float32, torch.bfloat16),
    tolerance_ulps=0.0,
    small_shapes=((1, 1), (5, 37), (130, 80)),
    bench_shapes=((8192, 4096), (8192, 14336)),
    variants=({}, {"factor": True}, {"columns": False}, {"rows": False}),
    num_bytes=lambda shape, itemsize: shape[0] * shape[1] * itemsize,
    num_flops=lambda shape: 2 * shape[0] * shape[1],
)
CODES_SPEC = OpSpec(
    name="float8_codes",
    op=_codes_as_bytes,
    reference=_codes_reference,
    make_inputs=_make_codes,
    dtypes=(torch.float32, torch.bfloat16),
    interpreted_dtypes=(torch.float32, torch.bfloat16),
    tolerance_ulps=0.0,
    small_shapes=((1, 1), (5, 37), (130, 80)),
    bench_shapes=((8192, 4096), (8192, 14336)),
    variants=(
        {},
        {"factor": True},
        {"factor": True, "codes": torch.float8_e5m2},
        {"columns": False},
        {"columns": False, "turned": True},
        {"rows": False},
    ),
    num_bytes=lambda shape, itemsize: shape[0] * shape[1] * (itemsize + 2),
    num_flops=lambda shape: 4 * shape[0] * shape[1],
)
