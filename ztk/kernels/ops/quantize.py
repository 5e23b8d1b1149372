"""Block quantisation of flat buckets for communication: int8 or int4 codes with one float32 scale per group.

    scale = max|x| / Q over the group, Q = 127 or 7
    code  = floor(x / scale + 0.5), and back: x' = code * scale

A chunk of n elements becomes one row of bytes: codes, then scales, padded to 16 bytes, so that one all-to-all of the
rows carries both. Groups are contiguous in the chunk (the last may be short). A group of int8 codes is two parts, one of
int4 codes four, and 16-bit word j of it holds element j of every part, the first in the lowest bits: eight words and eight
16-bit values of a part are 16 bytes each, so no access is narrow and nothing is shuffled between threads.
Traffic for bf16: quantise reads 2 and writes 1.02 bytes per element (int4: 0.52), dequantise the reverse,
dequantise-and-reduce over W chunks reads W * 1.02 and writes 2: the sum never exists in a second buffer.

An inf or nan anywhere in a group makes its scale inf or nan, and with it every dequantised element: overflow
survives the transfer and is detected by the following sum of squares.

Wang et al., ZeRO++, https://arxiv.org/abs/2306.10209
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.grids import cdiv
from ztk.kernels.launch.jit import Bound, LaunchedKernel, bind, jit, kept
from ztk.kernels.launch.library import register, use_reference
from ztk.kernels.launch.machine import Machine, machine
from ztk.kernels.launch.memory import Memory, maker, memory_of
from ztk.kernels.shared.math import cast
from ztk.kernels.shared.spec import OpSpec, compute_dtype

NUM_WARPS = 4
ALIGN = 16  # rows start on 16 bytes
WORD_BITS = 16
QUANTISED_MAX = {8: 127, 4: 7}


@triton.jit
def _load_part(p_x, o_j, N, i_part, PART: tl.constexpr):
    """Part `i_part` of the groups whose part 0 is at `o_j`, float32 [BLOCK_G, PART]"""
    o_x = o_j + i_part * PART
    return tl.load(p_x + o_x, mask=o_x < N, other=0.0).to(tl.float32)


@triton.jit
def _magnitude(b_x):
    """|x| as an integer: inf and nan order above every finite value, where a float max may drop nan."""
    return b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _code(b_x, b_inverse, i_part, BITS: tl.constexpr):
    """floor(x / scale + 0.5) at its place in the word"""
    Q: tl.constexpr = 127 if BITS == 8 else 7
    # Clamped before the cast: a value in a group with an inf or nan is arbitrary, and an out-of-range cast is undefined.
    b_code = tl.minimum(tl.maximum(tl.floor(b_x * b_inverse + 0.5), -Q), Q).to(tl.int32)
    return (b_code & ((1 << BITS) - 1)) << (BITS * i_part)


@triton.jit
def _value(b_word, i_part, BITS: tl.constexpr):
    """The code of part `i_part` in sign-extended words, as float32"""
    return ((b_word << (32 - BITS * (i_part + 1))) >> (32 - BITS)).to(tl.float32)


@jit
def _quantize_fwd(
    x_ptr, words_ptr, scales_ptr, N, num_groups, stride_bytes, code_bytes,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """scale = max|x| / Q; code = floor(x / scale + 0.5)"""
    PART: tl.constexpr = GROUP * BITS // 16
    Q: tl.constexpr = 127 if BITS == 8 else 7
    i_w = tl.program_id(1).to(tl.int64)
    o_g = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G)
    m_g = o_g < num_groups
    o_j = o_g[:, None] * GROUP + tl.arange(0, PART)[None, :]  # [BLOCK_G, PART]
    p_x = x_ptr + i_w * N
    b_0 = _load_part(p_x, o_j, N, 0, PART)
    b_1 = _load_part(p_x, o_j, N, 1, PART)
    b_largest = tl.maximum(_magnitude(b_0), _magnitude(b_1))
    if BITS == 4:
        b_2 = _load_part(p_x, o_j, N, 2, PART)
        b_3 = _load_part(p_x, o_j, N, 3, PART)
        b_largest = tl.maximum(b_largest, tl.maximum(_magnitude(b_2), _magnitude(b_3)))
    b_max = tl.max(b_largest, axis=1).to(tl.float32, bitcast=True)  # [BLOCK_G]
    # Rounded as in IEEE's division: the fast one of a GPU moves values in the middle of two codes to the other one.
    b_q = tl.full([BLOCK_G], Q, dtype=tl.float32)
    b_inverse = tl.where(b_max > 0.0, tl.div_rn(b_q, tl.maximum(b_max, 1e-30)), 0.0)[:, None]
    b_word = _code(b_0, b_inverse, 0, BITS) | _code(b_1, b_inverse, 1, BITS)
    if BITS == 4:
        b_word |= _code(b_2, b_inverse, 2, BITS) | _code(b_3, b_inverse, 3, BITS)
    p_words = words_ptr + i_w * stride_bytes // 2 + o_g[:, None] * PART + tl.arange(0, PART)[None, :]
    tl.store(p_words, b_word.to(tl.int16), mask=m_g[:, None])
    tl.store(scales_ptr + (i_w * stride_bytes + code_bytes) // 4 + o_g, tl.div_rn(b_max, b_q), mask=m_g)


@jit
def _dequantize_fwd(
    words_ptr, scales_ptr, out_ptr, N, num_groups, stride_bytes, code_bytes,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """x = code * scale"""
    PART: tl.constexpr = GROUP * BITS // 16
    i_w = tl.program_id(1).to(tl.int64)
    o_g = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G)
    m_g = o_g < num_groups
    p_words = words_ptr + i_w * stride_bytes // 2 + o_g[:, None] * PART + tl.arange(0, PART)[None, :]
    b_word = tl.load(p_words, mask=m_g[:, None], other=0).to(tl.int32)
    b_scale = tl.load(scales_ptr + (i_w * stride_bytes + code_bytes) // 4 + o_g, mask=m_g, other=0.0)[:, None]
    o_j = o_g[:, None] * GROUP + tl.arange(0, PART)[None, :]
    for i_part in tl.static_range(16 // BITS):
        o_x = o_j + i_part * PART
        b_x = cast(_value(b_word, i_part, BITS) * b_scale, out_ptr.dtype.element_ty)
        tl.store(out_ptr + i_w * N + o_x, b_x, mask=o_x < N)


@triton.jit
def _store_sum(out_ptr, o_j, N, b_sum, factor, i_part, PART: tl.constexpr):
    """out = factor * sum, of part `i_part`"""
    o_x = o_j + i_part * PART
    tl.store(out_ptr + o_x, cast(b_sum * factor, out_ptr.dtype.element_ty), mask=o_x < N)


@jit
def _dequantize_reduce_fwd(
    words_ptr, scales_ptr, out_ptr, N, num_groups, stride_bytes, code_bytes, W, factor,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """out = factor * sum over rows w, in order, of code[w] * scale[w]"""
    PART: tl.constexpr = GROUP * BITS // 16
    o_g = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G)
    m_g = o_g < num_groups
    o_word = o_g[:, None] * PART + tl.arange(0, PART)[None, :]
    b_0 = tl.zeros([BLOCK_G, PART], dtype=tl.float32)
    b_1 = tl.zeros([BLOCK_G, PART], dtype=tl.float32)
    b_2 = tl.zeros([BLOCK_G, PART], dtype=tl.float32)
    b_3 = tl.zeros([BLOCK_G, PART], dtype=tl.float32)
    for i_w in range(0, W):
        o_row = tl.cast(i_w, tl.int64) * stride_bytes
        b_word = tl.load(words_ptr + o_row // 2 + o_word, mask=m_g[:, None], other=0).to(tl.int32)
        b_scale = tl.load(scales_ptr + (o_row + code_bytes) // 4 + o_g, mask=m_g, other=0.0)[:, None]
        b_0 += _value(b_word, 0, BITS) * b_scale
        b_1 += _value(b_word, 1, BITS) * b_scale
        if BITS == 4:
            b_2 += _value(b_word, 2, BITS) * b_scale
            b_3 += _value(b_word, 3, BITS) * b_scale
    o_j = o_g[:, None] * GROUP + tl.arange(0, PART)[None, :]
    _store_sum(out_ptr, o_j, N, b_0, factor, 0, PART)
    _store_sum(out_ptr, o_j, N, b_1, factor, 1, PART)
    if BITS == 4:
        _store_sum(out_ptr, o_j, N, b_2, factor, 2, PART)
        _store_sum(out_ptr, o_j, N, b_3, factor, 3, PART)


def _code_bytes(numel: int, *, bits: int, group: int) -> int:
    return cdiv(numel, group) * group * bits // 8


def quantized_bytes(numel: int, *, bits: int = 8, group: int = 256) -> int:
    """Bytes of one quantised row of `numel` elements: codes of full groups, float32 scales, padded to 16."""
    size = _code_bytes(numel, bits=bits, group=group) + 4 * cdiv(numel, group)
    return cdiv(size, ALIGN) * ALIGN


def _bound(
    kernel: LaunchedKernel, *numbers: float, target: Machine, rows: int, N: int, bits: int, group: int, itemsize: int
) -> Bound:
    """itemsize: bytes of a value in [rows, N]; rows 0: the grid has one dimension. numbers: the arguments after the common ones of all three
    kernels.

    A thread holds 16 bytes of words or of values of each part, whichever are fewer.
    """
    per_thread = 16 // max(itemsize, WORD_BITS // 8)
    block_g = max(1, per_thread * target.warp_size * NUM_WARPS * WORD_BITS // (group * bits))
    num_groups = cdiv(N, group)
    programs = cdiv(num_groups, block_g)
    sizes = num_groups, quantized_bytes(N, bits=bits, group=group), _code_bytes(N, bits=bits, group=group)
    return bind(
        kernel, N, *sizes, *numbers, grid=(programs, rows) if rows else (programs,), BITS=bits, GROUP=group,
        BLOCK_G=block_g, num_warps=NUM_WARPS, enable_fp_fusion=True,
    )  # fmt: skip


@kept
def _quantize_for(target: Machine, W: int, N: int, itemsize: int, bits: int, group: int) -> tuple[Bound, Memory]:
    """With the memory of the packed rows."""
    bound = _bound(_quantize_fwd, target=target, rows=W, N=N, bits=bits, group=group, itemsize=itemsize)
    return bound, memory_of(W, quantized_bytes(N, bits=bits, group=group), dtype=torch.int8)


def _launch_quantize(x: Tensor, bits: int, group: int) -> Tensor:
    W, N = x.shape
    bound, rows = _quantize_for(machine(x.device), W, N, x.element_size(), bits, group)
    packed = maker(x)(*rows)
    if W and N:
        bound.launch(x, packed.view(torch.int16), packed.view(torch.float32))
    return packed


@kept
def _dequantize_for(target: Machine, W: int, N: int, bits: int, group: int, dtype: torch.dtype) -> tuple[Bound, Memory]:
    """With the memory of the values."""
    bound = _bound(_dequantize_fwd, target=target, rows=W, N=N, bits=bits, group=group, itemsize=dtype.itemsize)
    return bound, memory_of(W, N, dtype=dtype)


def _launch_dequantize(packed: Tensor, numel: int, bits: int, group: int, dtype: torch.dtype) -> Tensor:
    W = packed.shape[0]
    bound, values = _dequantize_for(machine(packed.device), W, numel, bits, group, dtype)
    out = maker(packed)(*values)
    if W and numel:
        bound.launch(packed.view(torch.int16), packed.view(torch.float32), out)
    return out


@kept
def _reduce_for(
    target: Machine, W: int, N: int, bits: int, group: int, dtype: torch.dtype, factor: float
) -> tuple[Bound, Memory]:
    """With the memory of the sum."""
    sizes = {"N": N, "bits": bits, "group": group, "itemsize": dtype.itemsize}
    return _bound(_dequantize_reduce_fwd, W, factor, target=target, rows=0, **sizes), memory_of(N, dtype=dtype)


def _launch_dequantize_reduce(
    packed: Tensor, numel: int, bits: int, group: int, dtype: torch.dtype, factor: float
) -> Tensor:
    bound, values = _reduce_for(machine(packed.device), packed.shape[0], numel, bits, group, dtype, factor)
    out = maker(packed)(*values)
    if numel:
        bound.launch(packed.view(torch.int16), packed.view(torch.float32), out)
    return out


def _cpu_quantize(x: Tensor, bits: int, group: int) -> Tensor:
    W, N = x.shape
    num_groups = cdiv(N, group)
    packed = torch.zeros(W, quantized_bytes(N, bits=bits, group=group), dtype=torch.int8)
    if not x.numel():
        return packed
    Q = QUANTISED_MAX[bits]
    groups = torch.nn.functional.pad(x.float(), (0, num_groups * group - N)).view(W, num_groups, group)
    largest = groups.abs().amax(dim=2)  # keeps nan
    inverse = torch.where(largest > 0, torch.full_like(largest, Q) / largest.clamp_min(1e-30), 0.0)
    codes = groups.mul_(inverse[:, :, None]).add_(0.5).floor_().nan_to_num_(0.0).clamp_(-Q, Q).to(torch.int16)
    words = torch.zeros(W, num_groups, group * bits // WORD_BITS, dtype=torch.int16)
    for i_part, part in enumerate(codes.unflatten(2, (WORD_BITS // bits, -1)).unbind(2)):
        words |= (part & (1 << bits) - 1) << bits * i_part
    code_bytes = _code_bytes(N, bits=bits, group=group)
    packed[:, :code_bytes] = words.view(torch.int8).reshape(W, code_bytes)
    packed[:, code_bytes : code_bytes + 4 * num_groups].view(torch.float32).copy_(largest / Q)
    return packed


def _unpacked(packed: Tensor, *, numel: int, bits: int, group: int) -> Tensor:
    """float32 [W, numel] from the bytes of W rows."""
    W, num_groups = packed.shape[0], cdiv(numel, group)
    code_bytes = _code_bytes(numel, bits=bits, group=group)
    words = packed[:, :code_bytes].reshape(W, num_groups, -1).view(torch.int16)
    parts = [(words << WORD_BITS - bits * (i + 1)) >> WORD_BITS - bits for i in range(WORD_BITS // bits)]
    codes = torch.cat(parts, dim=2)
    scales = packed[:, code_bytes : code_bytes + 4 * num_groups].view(torch.float32)
    return codes.float().mul_(scales[:, :, None]).view(W, -1)[:, :numel]


def _cpu_dequantize(packed: Tensor, numel: int, bits: int, group: int, dtype: torch.dtype) -> Tensor:
    return _unpacked(packed, numel=numel, bits=bits, group=group).to(dtype).contiguous()


def _cpu_dequantize_reduce(
    packed: Tensor, numel: int, bits: int, group: int, dtype: torch.dtype, factor: float
) -> Tensor:
    total = torch.zeros(numel)
    for row in packed:  # in order, one row of scratch: the sum does not depend on a reduction's blocking
        total += _unpacked(row[None], numel=numel, bits=bits, group=group)[0]
    return total.mul_(factor).to(dtype)


_quantize = register(
    "quantize(Tensor x, int bits, int group) -> Tensor",
    triton=_launch_quantize,
    cpu=_cpu_quantize,
    fake=lambda x, bits, group: x.new_empty(
        x.shape[0], quantized_bytes(x.shape[1], bits=bits, group=group), dtype=torch.int8
    ),
)
_dequantize = register(
    "dequantize(Tensor packed, int numel, int bits, int group, ScalarType dtype) -> Tensor",
    triton=_launch_dequantize,
    cpu=_cpu_dequantize,
    fake=lambda packed, numel, bits, group, dtype: packed.new_empty(packed.shape[0], numel, dtype=dtype),
)
_dequantize_reduce = register(
    "dequantize_reduce(Tensor packed, int numel, int bits, int group, ScalarType dtype, float factor) -> Tensor",
    triton=_launch_dequantize_reduce,
    cpu=_cpu_dequantize_reduce,
    fake=lambda packed, numel, bits, group, dtype, factor: packed.new_empty(numel, dtype=dtype),
)


def _validate(name: str, *, bits: int, group: int) -> None:
    if bits not in QUANTISED_MAX:
        raise ValueError(f"{name}: bits={bits} is not supported; choose 8 or 4")
    if group < 32 or group & (group - 1):
        raise ValueError(f"{name}: group={group} must be a power of two of at least 32")


def _validate_packed(name: str, packed: Tensor, *, numel: int, bits: int, group: int) -> None:
    _validate(name, bits=bits, group=group)
    expected = quantized_bytes(numel, bits=bits, group=group)
    if packed.dtype != torch.int8 or packed.dim() != 2 or packed.shape[1] != expected or not packed.is_contiguous():
        raise ValueError(
            f"{name}: packed {tuple(packed.shape)} {packed.dtype} must be contiguous int8 [chunks, {expected}] for "
            f"numel={numel}, bits={bits}, group={group}"
        )


def quantize(x: Tensor, *, bits: int = 8, group: int = 256) -> Tensor:
    """Quantise each row of `x` [W, N] (or [N], one row) to int8 bytes [W, quantized_bytes(N)]; no gradient.

    x is float32, float16 or bfloat16; row w is sent to rank w. `bits` is 8 or 4, `group` a power of two
    from 32: elements that share a scale. The error of an element is at most half a step, max|group| / 254 or / 14.
    Raises ValueError for other shapes and options.
    """
    _validate("quantize", bits=bits, group=group)
    if x.dim() not in (1, 2):
        raise ValueError(f"quantize: x {tuple(x.shape)} must be [N] or [chunks, N]; flatten it first")
    rows = x.detach().reshape(-1, x.shape[-1]).contiguous()
    return _cpu_quantize(rows, bits, group) if use_reference() else _quantize(rows, bits, group)


def dequantize(
    packed: Tensor, *, numel: int, bits: int = 8, group: int = 256, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values [W, numel] of `dtype` in `packed` [W, quantized_bytes(numel)] from `quantize`; no gradient."""
    _validate_packed("dequantize", packed, numel=numel, bits=bits, group=group)
    if use_reference():
        return dequantize_reference(packed, numel=numel, bits=bits, group=group, dtype=dtype)
    return _dequantize(packed, numel, bits, group, dtype)


def dequantize_reduce(
    packed: Tensor,
    *,
    numel: int,
    bits: int = 8,
    group: int = 256,
    dtype: torch.dtype = torch.float32,
    factor: float = 1.0,
) -> Tensor:
    """factor * (sum of the W rows of `packed`, in row order, in float32), as [numel] of `dtype`; no gradient."""
    _validate_packed("dequantize_reduce", packed, numel=numel, bits=bits, group=group)
    if use_reference():
        return dequantize_reduce_reference(packed, numel=numel, bits=bits, group=group, dtype=dtype, factor=factor)
    return _dequantize_reduce(packed, numel, bits, group, dtype, factor)


def dequantize_reference(
    packed: Tensor, *, numel: int, bits: int = 8, group: int = 256, dtype: torch.dtype = torch.float32
) -> Tensor:
    """code * scale, rounded once."""
    return _unpacked(packed, numel=numel, bits=bits, group=group).to(dtype)


def dequantize_reduce_reference(
    packed: Tensor,
    *,
    numel: int,
    bits: int = 8,
    group: int = 256,
    dtype: torch.dtype = torch.float32,
    factor: float = 1.0,
) -> Tensor:
    """factor * sum over rows of code * scale, rounded once."""
    return (_unpacked(packed, numel=numel, bits=bits, group=group).sum(dim=0) * factor).to(dtype)


def _round_trip(x: Tensor, *, bits: int, group: int) -> Tensor:
    """x after quantise and dequantise, in x's shape and dtype."""
    packed = quantize(x, bits=bits, group=group)
    return dequantize(packed, numel=x.shape[-1], bits=bits, group=group, dtype=x.dtype).view(x.shape)


def _round_trip_reference(x: Tensor, *, bits: int, group: int) -> Tensor:
    """floor(x / scale + 0.5) * scale with scale = max|group| / Q."""
    x_c, Q = x.to(compute_dtype(x)), QUANTISED_MAX[bits]
    num_groups = cdiv(x.shape[-1], group)
    groups = torch.nn.functional.pad(x_c, (0, num_groups * group - x.shape[-1])).view(*x.shape[:-1], num_groups, group)
    largest = groups.abs().amax(dim=-1, keepdim=True)
    codes = torch.floor(groups * torch.where(largest > 0, torch.full_like(largest, Q) / largest, 0.0) + 0.5)
    return (codes * (largest / Q)).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def _make_inputs(shape, *, dtype, device, bits=8, group=32) -> dict[str, object]:
    return {"x": torch.randn(shape, dtype=dtype, device=device), "bits": bits, "group": group}


def _make_packed_inputs(shape, *, dtype, device, bits=8, group=32) -> dict[str, object]:
    packed = quantize(torch.randn(shape, dtype=torch.float32, device=device), bits=bits, group=group)
    return {"packed": packed, "numel": shape[1], "bits": bits, "group": group, "dtype": dtype}


def _packed_share(bits: int, group: int = 256) -> float:
    """Wire bytes per element."""
    return bits / 8 + 4 / group


_SHAPES = ((1, 16), (3, 48), (2, 4112), (1, 8208))
_BENCH_SHAPES = ((8, 1 << 25),)
_VARIANTS = ({}, {"bits": 4}, {"group": 256}, {"bits": 4, "group": 128})

SPEC = OpSpec(
    name="quantize",
    op=_round_trip,
    reference=_round_trip_reference,
    make_inputs=_make_inputs,
    small_shapes=_SHAPES,
    bench_shapes=_BENCH_SHAPES,
    variants=_VARIANTS,
    num_bytes=lambda shape, itemsize: int(shape[0] * shape[1] * 2 * (itemsize + _packed_share(8))),  # there and back
    num_flops=lambda shape: 8 * shape[0] * shape[1],
)
DEQUANTIZE_SPEC = OpSpec(
    name="dequantize",
    op=dequantize,
    reference=dequantize_reference,
    make_inputs=_make_packed_inputs,
    small_shapes=_SHAPES,
    bench_shapes=_BENCH_SHAPES,
    variants=_VARIANTS,
    num_bytes=lambda shape, itemsize: int(shape[0] * shape[1] * (itemsize + _packed_share(8))),
    num_flops=lambda shape: shape[0] * shape[1],
)
DEQUANTIZE_REDUCE_SPEC = OpSpec(
    name="dequantize_reduce",
    op=dequantize_reduce,
    reference=dequantize_reduce_reference,
    make_inputs=_make_packed_inputs,
    small_shapes=_SHAPES,
    bench_shapes=_BENCH_SHAPES,
    variants=_VARIANTS,
    num_bytes=lambda shape, itemsize: int(shape[1] * (shape[0] * _packed_share(8) + itemsize)),
    num_flops=lambda shape: 2 * shape[0] * shape[1],
)
