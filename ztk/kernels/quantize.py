"""Block quantisation of flat buckets for communication: int8 or int4 codes with one float32 scale per group.

    scale = max|x| / Q over the group, Q = 127 or 7
    code  = floor(x / scale + 0.5), and back: x' = code * scale

A chunk of n elements becomes one row of bytes: codes, then scales, padded to 16 bytes, so that one all-to-all of the
rows carries both. Groups are contiguous in the chunk (the last may be short), and in a group of int4 codes byte j holds
elements j (low nibble) and j + group/2 (high nibble): both halves are contiguous loads, nothing is shuffled.
Traffic for bf16: quantise reads 2 and writes 1.02 bytes per element (int4: 0.52), dequantise the reverse,
dequantise-and-reduce over W chunks reads W * 1.02 and writes 2: the sum never exists in a second buffer.

An inf or nan anywhere in a group makes its scale inf or nan, and with it every element that comes back: overflow
survives the wire and is seen by the sum of squares behind it.

Wang et al., ZeRO++, https://arxiv.org/abs/2306.10209
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels._library import WARP_SIZE, register, use_reference
from ztk.kernels._math import cast
from ztk.kernels._spec import AotCase, OpSpec, compute_dtype

NUM_WARPS = 4
CODES = (
    16 * WARP_SIZE * NUM_WARPS
)  # of a half tile that is quantised: a thread stores 16 bytes of codes, loads 32 of values
VALUES = 8 * WARP_SIZE * NUM_WARPS  # of a half tile that is dequantised: a thread stores 16 bytes of 16-bit values
ALIGN = 16  # rows start on 16 bytes
QUANTISED_MAX = {8: 127, 4: 7}


@triton.jit
def _quantize_fwd(
    x_ptr, codes_ptr, scales_ptr, N, num_groups, stride_bytes, code_bytes,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """scale = max|x| / Q; code = floor(x / scale + 0.5)"""
    HALF: tl.constexpr = GROUP // 2
    Q: tl.constexpr = 127 if BITS == 8 else 7
    i_w = tl.program_id(1).to(tl.int64)
    o_g = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G)
    m_g = o_g < num_groups
    o_lo = o_g[:, None] * GROUP + tl.arange(0, HALF)[None, :]  # [BLOCK_G, HALF]
    b_lo = tl.load(x_ptr + i_w * N + o_lo, mask=o_lo < N, other=0.0).to(tl.float32)
    b_hi = tl.load(x_ptr + i_w * N + o_lo + HALF, mask=o_lo + HALF < N, other=0.0).to(tl.float32)
    # The largest magnitude as an integer: inf and nan order above every finite value, where a float max may drop nan.
    b_lo_bits = b_lo.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    b_hi_bits = b_hi.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    b_max = tl.max(tl.maximum(b_lo_bits, b_hi_bits), axis=1).to(tl.float32, bitcast=True)  # [BLOCK_G]
    b_inverse = tl.where(b_max > 0.0, Q / tl.maximum(b_max, 1e-30), 0.0)[:, None]
    # Clamped before the cast: a value beside an inf or nan may be anything, and an out-of-range cast is undefined.
    b_lo = tl.minimum(tl.maximum(tl.floor(b_lo * b_inverse + 0.5), -Q), Q).to(tl.int32)
    b_hi = tl.minimum(tl.maximum(tl.floor(b_hi * b_inverse + 0.5), -Q), Q).to(tl.int32)
    p_row = codes_ptr + i_w * stride_bytes
    if BITS == 8:
        tl.store(p_row + o_lo, b_lo.to(tl.int8), mask=m_g[:, None])
        tl.store(p_row + o_lo + HALF, b_hi.to(tl.int8), mask=m_g[:, None])
    else:
        o_byte = o_g[:, None] * HALF + tl.arange(0, HALF)[None, :]
        tl.store(p_row + o_byte, ((b_lo & 15) | (b_hi << 4)).to(tl.int8), mask=m_g[:, None])
    tl.store(scales_ptr + (i_w * stride_bytes + code_bytes) // 4 + o_g, b_max / Q, mask=m_g)


@triton.jit
def _load_codes(p_row, o_g, m_g, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Both halves of the groups `o_g` of one row, as float32 codes [BLOCK_G, GROUP / 2]."""
    HALF: tl.constexpr = GROUP // 2
    if BITS == 8:
        o_lo = o_g[:, None] * GROUP + tl.arange(0, HALF)[None, :]
        b_lo = tl.load(p_row + o_lo, mask=m_g[:, None], other=0).to(tl.float32)
        b_hi = tl.load(p_row + o_lo + HALF, mask=m_g[:, None], other=0).to(tl.float32)
    else:
        o_byte = o_g[:, None] * HALF + tl.arange(0, HALF)[None, :]
        b_byte = tl.load(p_row + o_byte, mask=m_g[:, None], other=0).to(tl.int32)  # sign extended
        b_lo = ((b_byte << 28) >> 28).to(tl.float32)
        b_hi = (b_byte >> 4).to(tl.float32)
    return b_lo, b_hi


@triton.jit
def _dequantize_fwd(
    codes_ptr, scales_ptr, out_ptr, N, num_groups, stride_bytes, code_bytes,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """x = code * scale"""
    HALF: tl.constexpr = GROUP // 2
    i_w = tl.program_id(1).to(tl.int64)
    o_g = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G)
    m_g = o_g < num_groups
    b_lo, b_hi = _load_codes(codes_ptr + i_w * stride_bytes, o_g, m_g, BITS, GROUP)
    b_scale = tl.load(scales_ptr + (i_w * stride_bytes + code_bytes) // 4 + o_g, mask=m_g, other=0.0)[:, None]
    o_lo = o_g[:, None] * GROUP + tl.arange(0, HALF)[None, :]
    p_out = out_ptr + i_w * N + o_lo
    tl.store(p_out, cast(b_lo * b_scale, out_ptr.dtype.element_ty), mask=o_lo < N)
    tl.store(p_out + HALF, cast(b_hi * b_scale, out_ptr.dtype.element_ty), mask=o_lo + HALF < N)


@triton.jit
def _dequantize_reduce_fwd(
    codes_ptr, scales_ptr, out_ptr, N, num_groups, stride_bytes, code_bytes, W, factor,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """out = factor * sum over rows w, in order, of code[w] * scale[w]"""
    HALF: tl.constexpr = GROUP // 2
    o_g = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G)
    m_g = o_g < num_groups
    b_sum_lo = tl.zeros([BLOCK_G, HALF], dtype=tl.float32)
    b_sum_hi = tl.zeros([BLOCK_G, HALF], dtype=tl.float32)
    for i_w in range(0, W):
        o_row = tl.cast(i_w, tl.int64) * stride_bytes
        b_lo, b_hi = _load_codes(codes_ptr + o_row, o_g, m_g, BITS, GROUP)
        b_scale = tl.load(scales_ptr + (o_row + code_bytes) // 4 + o_g, mask=m_g, other=0.0)[:, None]
        b_sum_lo += b_lo * b_scale
        b_sum_hi += b_hi * b_scale
    o_lo = o_g[:, None] * GROUP + tl.arange(0, HALF)[None, :]
    tl.store(out_ptr + o_lo, cast(b_sum_lo * factor, out_ptr.dtype.element_ty), mask=o_lo < N)
    tl.store(out_ptr + o_lo + HALF, cast(b_sum_hi * factor, out_ptr.dtype.element_ty), mask=o_lo + HALF < N)


def _code_bytes(numel: int, *, bits: int, group: int) -> int:
    return triton.cdiv(numel, group) * group * bits // 8


def quantized_bytes(numel: int, *, bits: int = 8, group: int = 256) -> int:
    """Bytes of one quantised row of `numel` elements: codes of whole groups, float32 scales, padded to 16."""
    size = _code_bytes(numel, bits=bits, group=group) + 4 * triton.cdiv(numel, group)
    return triton.cdiv(size, ALIGN) * ALIGN


def _grid(numel: int, *, group: int, tile: int) -> tuple[int, int]:
    """(programs, groups per program) for half tiles of `tile` elements"""
    block_g = max(1, tile // (group // 2))
    return triton.cdiv(triton.cdiv(numel, group), block_g), block_g


def _launch_quantize(x: Tensor, bits: int, group: int) -> Tensor:
    W, N = x.shape
    packed = torch.empty(W, quantized_bytes(N, bits=bits, group=group), dtype=torch.int8, device=x.device)
    if x.numel():
        programs, block_g = _grid(N, group=group, tile=CODES)
        _quantize_fwd[(programs, W)](
            x, packed, packed.view(torch.float32), N, triton.cdiv(N, group), packed.shape[1],
            _code_bytes(N, bits=bits, group=group), BITS=bits, GROUP=group, BLOCK_G=block_g, num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )  # fmt: skip
    return packed


def _launch_dequantize(packed: Tensor, numel: int, bits: int, group: int, dtype: torch.dtype) -> Tensor:
    W = packed.shape[0]
    out = torch.empty(W, numel, dtype=dtype, device=packed.device)
    if out.numel():
        programs, block_g = _grid(numel, group=group, tile=VALUES)
        _dequantize_fwd[(programs, W)](
            packed, packed.view(torch.float32), out, numel, triton.cdiv(numel, group), packed.shape[1],
            _code_bytes(numel, bits=bits, group=group), BITS=bits, GROUP=group, BLOCK_G=block_g, num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )  # fmt: skip
    return out


def _launch_dequantize_reduce(
    packed: Tensor, numel: int, bits: int, group: int, dtype: torch.dtype, factor: float
) -> Tensor:
    out = torch.empty(numel, dtype=dtype, device=packed.device)
    if out.numel():
        programs, block_g = _grid(numel, group=group, tile=VALUES)
        _dequantize_reduce_fwd[(programs,)](
            packed, packed.view(torch.float32), out, numel, triton.cdiv(numel, group), packed.shape[1],
            _code_bytes(numel, bits=bits, group=group), packed.shape[0], factor,
            BITS=bits, GROUP=group, BLOCK_G=block_g, num_warps=NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def _cpu_quantize(x: Tensor, bits: int, group: int) -> Tensor:
    W, N = x.shape
    num_groups = triton.cdiv(N, group)
    packed = torch.zeros(W, quantized_bytes(N, bits=bits, group=group), dtype=torch.int8)
    if not x.numel():
        return packed
    Q = QUANTISED_MAX[bits]
    groups = torch.nn.functional.pad(x.float(), (0, num_groups * group - N)).view(W, num_groups, group)
    largest = groups.abs().amax(dim=2)  # keeps nan
    inverse = torch.where(largest > 0, torch.full_like(largest, Q) / largest.clamp_min(1e-30), 0.0)
    codes = groups.mul_(inverse[:, :, None]).add_(0.5).floor_().nan_to_num_(0.0).clamp_(-Q, Q).to(torch.int8)
    if bits == 4:
        codes = (codes[:, :, : group // 2] & 15) | (codes[:, :, group // 2 :] << 4)
    code_bytes = _code_bytes(N, bits=bits, group=group)
    packed[:, :code_bytes] = codes.reshape(W, code_bytes)
    packed[:, code_bytes : code_bytes + 4 * num_groups].view(torch.float32).copy_(largest / Q)
    return packed


def _unpacked(packed: Tensor, *, numel: int, bits: int, group: int) -> Tensor:
    """float32 [W, numel] from the bytes of W rows."""
    W, num_groups = packed.shape[0], triton.cdiv(numel, group)
    code_bytes = _code_bytes(numel, bits=bits, group=group)
    codes = packed[:, :code_bytes].reshape(W, num_groups, -1)
    if bits == 4:
        codes = torch.cat(((codes << 4) >> 4, codes >> 4), dim=2)
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

    x is float32, float16 or bfloat16; row w holds what rank w is to receive. `bits` is 8 or 4, `group` a power of two
    from 32: elements that share a scale. The error of an element is at most half a step, max|group| / 254 or / 14.
    """
    _validate("quantize", bits=bits, group=group)
    if x.dim() not in (1, 2):
        raise ValueError(f"quantize: x {tuple(x.shape)} must be [N] or [chunks, N]; flatten it first")
    rows = x.detach().reshape(-1, x.shape[-1]).contiguous()
    return _cpu_quantize(rows, bits, group) if use_reference() else _quantize(rows, bits, group)


def dequantize(
    packed: Tensor, *, numel: int, bits: int = 8, group: int = 256, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values [W, numel] of `dtype` behind `packed` [W, quantized_bytes(numel)] from `quantize`; no gradient."""
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
    """What arrives: x after quantise and dequantise, in x's shape and dtype."""
    packed = quantize(x, bits=bits, group=group)
    return dequantize(packed, numel=x.shape[-1], bits=bits, group=group, dtype=x.dtype).view(x.shape)


def _round_trip_reference(x: Tensor, *, bits: int, group: int) -> Tensor:
    """floor(x / scale + 0.5) * scale with scale = max|group| / Q."""
    x_c, Q = x.to(compute_dtype(x)), QUANTISED_MAX[bits]
    num_groups = triton.cdiv(x.shape[-1], group)
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


_NARROW_CODES = (
    "a thread stores eight 16-bit values, 16 bytes, and so loads eight codes; sixteen codes a thread would change layout "
    "through shared memory, three barriers in a kernel that needs none"
)


def _aot_case(kernel, *, bits: int, x: str, dtype: str, **budget) -> AotCase:
    names = ("N", "num_groups", "stride_bytes", "code_bytes")
    reduce = {"W": "i32", "factor": "fp32"} if kernel is _dequantize_reduce_fwd else {}
    per_thread = 16 if kernel is _quantize_fwd else 8
    if kernel is not _quantize_fwd:
        budget |= {"vector_load_bytes": 8, "vector_reason": _NARROW_CODES, "max_barriers": 0}
    return AotCase(
        kernel=kernel,
        variant=f"int{bits}",
        signature={x: f"*{dtype}", "codes_ptr": "*i8", "scales_ptr": "*fp32", **dict.fromkeys(names, "i64"), **reduce},
        constexprs={"BITS": bits, "GROUP": 256, "BLOCK_G": per_thread * 32 * NUM_WARPS // 128},
        hip_constexprs={"BLOCK_G": per_thread * 64 * NUM_WARPS // 128},
        divisible_by_16=(x, "codes_ptr", "scales_ptr", "N", "stride_bytes", "code_bytes"),
        elements_per_program=2 * per_thread * 32 * NUM_WARPS,
        **budget,
    )


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
    aot=(
        _aot_case(_quantize_fwd, bits=8, x="x_ptr", dtype="bf16", max_registers=64),
        _aot_case(_quantize_fwd, bits=4, x="x_ptr", dtype="bf16", max_registers=64),
    ),
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
    aot=(
        _aot_case(_dequantize_fwd, bits=8, x="out_ptr", dtype="bf16", max_registers=40),
        _aot_case(_dequantize_fwd, bits=4, x="out_ptr", dtype="bf16", max_registers=40),
    ),
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
    aot=(
        _aot_case(_dequantize_reduce_fwd, bits=8, x="out_ptr", dtype="bf16", max_registers=64),
        _aot_case(_dequantize_reduce_fwd, bits=4, x="out_ptr", dtype="bf16", max_registers=64),
    ),
)
