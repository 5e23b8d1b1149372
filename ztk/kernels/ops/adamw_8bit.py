"""AdamW in seven bytes per parameter: a master split into 16 + 8 bits and moments of 8 bits.

Master. The parameter is the upper half of a float32, rounded: bits(master) = (param << 16) + (low << 8) with a signed
8-bit `low`. So the bfloat16 parameter the model computes with is the master's own upper half, no copy is written, and
the pair keeps 16 bits of mantissa (relative step 2^-15, rounded stochastically, so small updates survive on average).

Moments. Groups of 32 elements along the flat index share a bfloat16 scale, rounded up; codes are companded:
    exp_avg    = sign(c) * (c / 127)^2 * scale_m        signed code c
    exp_avg_sq = (c / 255)^2 * scale_v^2                unsigned code c, never 0 for a value above 0: a zero denominator
                                                        under a nonzero exp_avg would be an unbounded update
and rounded stochastically: exp_avg_sq changes by a thousandth per step, far below half a code.

Memory per parameter: 2 + 1 + 1 + 1 + 2 * 2/32 = 5.125 bytes, with the bfloat16 gradient 7.125. Reads 7.125 and writes
5.125. One 32-bit hash per element gives the bits for all three roundings. Partitions must be cut at multiples of 32.

Storage of the class of https://github.com/databricks/flashoptim; companding instead of the code table of Dettmers
et al., https://arxiv.org/abs/2110.02861
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.grids import cdiv
from ztk.kernels.launch.jit import jit
from ztk.kernels.shared import flat
from ztk.kernels.shared.adam import update, update_cpu, updated
from ztk.kernels.shared.control import SKIP, STEP, Control
from ztk.kernels.shared.cpu import PIECE
from ztk.kernels.shared.rounding import random_bits, random_bits_cpu, random_bits_like
from ztk.kernels.shared.tiles import part_of
from ztk.kernels.shared.workers import in_parts

GROUP = 32
SMALLEST_NORMAL = 2.0**-126  # of float32; a constant below it would be float64, and make the kernel compute in it

_GROUP = tl.constexpr(GROUP)
_SMALLEST_NORMAL = tl.constexpr(SMALLEST_NORMAL)


@triton.jit
def _round_up_bf16(b_x):
    """float32 b_x >= 0 as the next bfloat16 above, still float32"""
    return ((b_x.to(tl.int32, bitcast=True) + 0xFFFF) & 0x7FFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _store_scale(p_scale, b_scale, m_g):
    """b_scale, already a bfloat16 value, through an int16 pointer"""
    tl.store(p_scale, (b_scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=m_g)


@triton.jit
def _load_scale(p_scale, m_g):
    """bf16 bits in int16 -> fp32"""
    return (tl.load(p_scale, mask=m_g, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(b_scale):
    """1 / scale, 0 for a scale of 0"""
    return tl.where(b_scale > 0.0, 1.0 / tl.maximum(b_scale, _SMALLEST_NORMAL), 0.0)


@jit(do_not_specialize=["seed", "start"])
def _adamw_8bit(
    param_ptr, low_ptr, grad_ptr, code_m_ptr, code_v_ptr, scale_m_ptr, scale_v_ptr, control_ptr, tiles_ptr, N, seed, start,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of the AdamW update between decoding and encoding of the state"""
    BLOCK_G: tl.constexpr = BLOCK // _GROUP
    if tl.load(control_ptr + SKIP) == 0.0:
        first, stop, control_ptr, shift = part_of(tiles_ptr, control_ptr, N, start, PROGRAMS, BLOCK)
        o_g = first // _GROUP + tl.arange(0, BLOCK_G)
        m_g = o_g * _GROUP < stop
        o_n = o_g[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]  # [BLOCK_G, GROUP]
        m_n = o_n < stop
        high_ptr = param_ptr.to(tl.pointer_type(tl.int16))
        p_scale_m = scale_m_ptr.to(tl.pointer_type(tl.int16)) + o_g
        p_scale_v = scale_v_ptr.to(tl.pointer_type(tl.int16)) + o_g
        b_high = tl.load(high_ptr + o_n, mask=m_n, other=0).to(tl.int32)
        b_low = tl.load(low_ptr + o_n, mask=m_n, other=0).to(tl.int32)
        b_p = ((b_high << 16) + (b_low << 8)).to(tl.float32, bitcast=True)
        b_m = tl.load(code_m_ptr + o_n, mask=m_n, other=0).to(tl.float32)
        b_m = b_m * tl.abs(b_m) * (_load_scale(p_scale_m, m_g) * (1.0 / 16129.0))[:, None]
        b_v = tl.load(code_v_ptr + o_n, mask=m_n, other=0).to(tl.float32)
        b_v = b_v * (_load_scale(p_scale_v, m_g) * (1.0 / 255.0))[:, None]
        b_g = tl.load(grad_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_p, b_m, b_v = update(control_ptr, b_p, b_g, b_m, b_v * b_v, True)
        b_random = random_bits(shift + o_n, tl.load(control_ptr + STEP), seed).to(tl.int32, bitcast=True)

        b_bits = (b_p.to(tl.int32, bitcast=True) + (b_random & 0xFF)) & -256
        b_high = (b_bits + 0x8000) >> 16
        tl.store(high_ptr + o_n, b_high.to(tl.int16), mask=m_n)
        tl.store(low_ptr + o_n, ((b_bits - (b_high << 16)) >> 8).to(tl.int8), mask=m_n)

        b_size = tl.abs(b_m)
        b_scale = _round_up_bf16(tl.max(b_size, axis=1))
        b_code = 127.0 * tl.sqrt(b_size * _inverse(b_scale)[:, None])
        b_code = tl.floor(b_code + ((b_random >> 8) & 0xFF).to(tl.float32) * (1.0 / 256.0))
        b_code = tl.minimum(b_code, 127.0)
        tl.store(code_m_ptr + o_n, tl.where(b_m < 0.0, -b_code, b_code).to(tl.int8), mask=m_n)
        _store_scale(p_scale_m, b_scale, m_g)

        b_root = tl.sqrt(b_v)
        b_scale = _round_up_bf16(tl.max(b_root, axis=1))
        b_code = 255.0 * (b_root * _inverse(b_scale)[:, None])
        b_code = tl.floor(b_code + ((b_random >> 16) & 0xFF).to(tl.float32) * (1.0 / 256.0))
        b_code = tl.minimum(tl.maximum(b_code, tl.where(b_v > 0.0, 1.0, 0.0)), 255.0)
        tl.store(code_v_ptr + o_n, b_code.to(tl.uint8), mask=m_n)
        _store_scale(p_scale_v, b_scale, m_g)


def _grouped(x: Tensor) -> Tensor:
    """[n] as [groups, 32], zero-padded."""
    if x.numel() % GROUP == 0:
        return x.view(-1, GROUP)
    return torch.nn.functional.pad(x, (0, -x.numel() % GROUP)).view(-1, GROUP)


def decode_master(param: Tensor, *, low: Tensor) -> Tensor:
    """The float32 master [n] from the bfloat16 `param` and the int8 `low`."""
    return ((param.view(torch.int16).int() << 16) + (low.int() << 8)).view(torch.float32)


def decode_moments(*, code_m: Tensor, code_v: Tensor, scale_m: Tensor, scale_v: Tensor) -> tuple[Tensor, Tensor]:
    """(exp_avg, exp_avg_sq) float32 [n], decoded from codes and group scales."""
    n, c = code_m.numel(), _grouped(code_m).float()
    m = c * c.abs() * (scale_m.float() * (1.0 / 16129.0))[:, None]
    root = _grouped(code_v).float() * (scale_v.float() * (1.0 / 255.0))[:, None]
    return m.view(-1)[:n], (root * root).view(-1)[:n]


def encode_master(master: Tensor, *, random: Tensor) -> tuple[Tensor, Tensor]:
    """(bfloat16 param, int8 low) of a float32 [n], rounded by the low 8 bits of `random`."""
    bits = (master.view(torch.int32) + (random & 0xFF)) & -256
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), ((bits - (high << 16)) >> 8).to(torch.int8)


def _encode(size: Tensor, *, largest_code: float, random: Tensor, compand: bool) -> tuple[Tensor, Tensor]:
    """(codes float32 [n], bfloat16 scales [groups]) of nonnegative values, rounded by 8 random bits."""
    n, groups = size.numel(), _grouped(size)
    scale = ((groups.amax(dim=1).view(torch.int32) + 0xFFFF) & 0x7FFF0000).view(torch.float32)
    inverse = torch.where(scale > 0, scale.clamp_min(SMALLEST_NORMAL).reciprocal(), 0.0)[:, None]
    share = (groups * inverse).view(-1)[:n]
    code = torch.floor(largest_code * (share.sqrt() if compand else share) + random.float() * (1.0 / 256.0))
    return code.clamp_max_(largest_code), scale.bfloat16()


def _write(param, low, code_m, code_v, scale_m, scale_v, *, p, m, v, random) -> None:
    """Encode p, m, v (float32 [n]) into the state tensors."""
    high, rest = encode_master(p, random=random)
    param.copy_(high)
    low.copy_(rest)
    code, scale = _encode(m.abs(), largest_code=127.0, random=(random >> 8) & 0xFF, compand=True)
    code_m.copy_(torch.copysign(code, m))
    scale_m.copy_(scale)
    code, scale = _encode(v.sqrt(), largest_code=255.0, random=(random >> 16) & 0xFF, compand=False)
    code_v.copy_(torch.maximum(code, (v > 0).float()))
    scale_v.copy_(scale)


def _cpu(param, low, grad, code_m, code_v, scale_m, scale_v, control: list, seed: int, start: int) -> None:
    def part(cut: slice) -> None:
        groups = slice(cut.start // GROUP, -(-cut.stop // GROUP))
        state = (param[cut], low[cut], code_m[cut], code_v[cut], scale_m[groups], scale_v[groups])
        p = decode_master(state[0], low=state[1])
        m, v = decode_moments(code_m=state[2], code_v=state[3], scale_m=state[4], scale_v=state[5])
        m, v = m.contiguous(), v.contiguous()
        update_cpu(p, grad[cut], m, v, control=control)
        random = random_bits_like(p, start=start + cut.start, step=int(control[Control.step]), seed=seed)
        _write(*state, p=p, m=m, v=v, random=random)

    in_parts(param.numel(), part, longest=PIECE)


_op = flat.register(
    "adamw_8bit(Tensor(a!) param, Tensor(b!) low, Tensor grad, Tensor(c!) code_m, Tensor(d!) code_v, "
    "Tensor(e!) scale_m, Tensor(f!) scale_v, Tensor control, int seed, int start, Tensor? tiles) -> ()",
    kernel=_adamw_8bit,
    update=_cpu,
    per_thread=(8, 8),
    group=GROUP,
)


def adamw_8bit(
    param: Tensor,
    *,
    low: Tensor,
    grad: Tensor,
    code_m: Tensor,
    code_v: Tensor,
    scale_m: Tensor,
    scale_v: Tensor,
    control: Tensor,
    seed: int = 0,
    start: int = 0,
    tiles: Tensor | None = None,
) -> None:
    """One AdamW step in place on a split master and 8-bit moments. Before the first step the state is zero.

    With control.skip nothing is written.

    Args:
        param: bfloat16 [n], the upper half of the master; n a multiple of 16.
        low: int8 [n], the master's next 8 bits.
        grad: bfloat16, float16 or float32 [n].
        code_m: int8 [n].
        code_v: uint8 [n].
        scale_m: bfloat16 [ceil(n / 32)].
        scale_v: the same for `code_v`.
        control: one row float32 [16] of `step_control`.
        seed: seeds the random bits.
        start: a multiple of 32, the index of element 0 in the unpartitioned buffer: with it and `seed`, the result does not
            depend on how the buffer was cut.
        tiles: made by `tiles_of` for this n, for parts with separate hyperparameters and positions (instead of `start`): one launch
            for all. `control` is then float32 [rows, 16], which the tiles index; elements outside of all tiles do not change.

    Raises:
        ValueError: a tensor of another shape, dtype or device, or not contiguous; another `start`.
    """
    tensors = {
        "param": (param, flat.BFLOAT16), "low": (low, (torch.int8,)), "grad": (grad, flat.GRAD_DTYPES),
        "code_m": (code_m, (torch.int8,)), "code_v": (code_v, (torch.uint8,)),
    }  # fmt: skip
    groups = {"scale_m": (scale_m, flat.BFLOAT16), "scale_v": (scale_v, flat.BFLOAT16)}
    flat.check("adamw_8bit", tensors=tensors, control=control, tiles=tiles, groups=groups, group=GROUP)
    if start % GROUP:
        raise ValueError(f"adamw_8bit: start={start} must be a multiple of {GROUP}; cut the buffer there")
    flat.dispatch(
        _op, reference=_by_tiles, param=param, low=low, grad=grad, code_m=code_m, code_v=code_v,
        scale_m=scale_m, scale_v=scale_v, control=control, seed=seed, start=start, tiles=tiles,
    )  # fmt: skip


def _reference(param, low, grad, code_m, code_v, scale_m, scale_v, control, seed=0, start=0) -> None:
    """Decode, update, encode, without pieces."""
    if control[Control.skip]:
        return
    p = decode_master(param, low=low)
    m, v = decode_moments(code_m=code_m, code_v=code_v, scale_m=scale_m, scale_v=scale_v)
    p, m, v = updated(p, g=grad.float(), m=m, v=v, control=control)
    random = random_bits_like(p, start=start, step=int(control[Control.step]), seed=seed)
    _write(param, low, code_m, code_v, scale_m, scale_v, p=p, m=m, v=v, random=random)


_by_tiles = flat.by_tiles(_reference, group=GROUP)


def _decoded(*, run=adamw_8bit, **inputs) -> tuple[Tensor, Tensor, Tensor]:
    """(master, exp_avg, exp_avg_sq) after the step: the form in which two implementations are compared."""
    run(**inputs)
    moments = decode_moments(**{name: inputs[name] for name in ("code_m", "code_v", "scale_m", "scale_v")})
    return decode_master(inputs["param"], low=inputs["low"]), *moments


def _make_inputs(shape, *, dtype, device, skip=False, start=0, fresh=False, segments=False) -> dict[str, object]:
    (n,) = shape
    g = cdiv(n, GROUP)
    master = torch.randn(n)
    random = random_bits_cpu(start=0, count=n, step=0, seed=1)
    state = {
        "param": torch.zeros(n, dtype=torch.bfloat16),
        "low": torch.zeros(n, dtype=torch.int8),
        "code_m": torch.zeros(n, dtype=torch.int8),
        "code_v": torch.zeros(n, dtype=torch.uint8),
        "scale_m": torch.zeros(g, dtype=torch.bfloat16),
        "scale_v": torch.zeros(g, dtype=torch.bfloat16),
    }
    if fresh or not n or n > 1 << 20:  # encoding a benchmark's state on the host would take minutes
        state["param"].copy_(master)
    else:
        names = ("param", "low", "code_m", "code_v", "scale_m", "scale_v")
        m, v = torch.randn(n) * 0.1, torch.rand(n) * 0.01
        _write(*(state[name] for name in names), p=master, m=m, v=v, random=random)
    state["grad"] = torch.randn(n).to(dtype)
    inputs = {name: tensor.to(device) for name, tensor in state.items()}
    control = flat.control_row(skip=skip, device=device)
    inputs |= {"control": control, "seed": 7, "start": start}
    return inputs | (flat.segment_inputs(n, control=control) if segments else {})


SPEC = flat.spec(
    "adamw_8bit",
    op=_decoded,
    reference=functools.partial(_decoded, run=_by_tiles),
    make_inputs=_make_inputs,
    small_shapes=((16,), (528,), (4128,), (0,)),
    variants=({}, {"start": (1 << 32) - 32}, {"skip": True}, {"fresh": True}, {"segments": True}),
    traffic=lambda itemsize: 10.25 + itemsize,
    flops=40,
    # A last-bit difference before rounding may turn one code in 250 by one step, 2/127 of its value.
    tolerance_ulps=2 / 127 * 250**-0.5 / torch.finfo(torch.float32).eps,
)
