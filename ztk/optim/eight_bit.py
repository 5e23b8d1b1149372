"""Conversion between float32 and the codes of `ztk.kernels.adamw_8bit`, outside of the update.

[Note: Codes from decoded numbers]
A checkpoint holds the decoded moments, so that any run can load them. An update uses the codes only through decoding: it decodes, computes
and encodes. So a resumed run has the same bits if the codes found for a group decode to the same 32 numbers, whichever codes these are.
`write_moments` finds them. The scale follows from the largest number of the group once its code is known, and the update gives the largest
number a code near the top, because scales are rounded up by less than 2^-7 (moments below float32's normal range get any code). A group
that no scale reproduces, such as one from another format, is rounded to nearest and counted.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ztk.kernels import decode_master, decode_moments, encode_master

GROUP = 32
_TOP = {"m": 127, "v": 255}  # the largest codes
_SLACK = 5  # codes below them that a group's largest number may have
_TINY = 1e-30  # a group with a smaller maximum may have any largest code
_NEAREST = 0x80  # added below the kept 24 bits: rounds to nearest, exact for numbers of 24 bits
_ELEMENTS = 1 << 20  # at once


def read_master(param: Tensor, *, rows: Mapping[str, Tensor]) -> Tensor:
    """float32 [n], whose cast is the parameter, from the bfloat16 parameter and the row `low`.

    A value in the middle between two bfloat16 values is moved by one float32 unit towards the parameter, because a cast rounds it to even
    and the update away from zero. `split` reverses this.
    """
    bits = decode_master(param.contiguous(), low=rows["low"]).view(torch.int32)
    return (bits + (rows["low"] == -128)).view(torch.float32)


def read_moments(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """exp_avg and exp_avg_sq, float32 [n]."""
    m, v = decode_moments(**{name: rows[name] for name in ("code_m", "code_v", "scale_m", "scale_v")})
    return {"exp_avg": m, "exp_avg_sq": v}


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """(bfloat16 parameter, int8 low) of float32 [n], rounded to the nearest 24 bits. Exact for results of `read_master`."""
    nearest = torch.full((1,), _NEAREST, dtype=torch.int32, device=master.device)
    return encode_master(master.contiguous(), random=nearest)


def write_moments(rows: Mapping[str, Tensor], *, exp_avg: Tensor, exp_avg_sq: Tensor) -> int:
    """Encodes float32 [n] into the rows, see [Note: Codes from decoded numbers]. Returns the number of groups that had to be rounded."""
    rounded = 0
    for start in range(0, exp_avg.numel(), _ELEMENTS):
        stop = min(start + _ELEMENTS, exp_avg.numel())
        cut, groups = slice(start, stop), slice(start // GROUP, -(-stop // GROUP))
        for kind, values in (("m", exp_avg[cut]), ("v", exp_avg_sq[cut])):
            code, scale, inexact = _codes(_groups(values), kind=kind)
            rows[f"code_{kind}"][cut].copy_(code.view(-1)[: stop - start])
            rows[f"scale_{kind}"][groups].copy_(scale)
            rounded += inexact
    return rounded


def _groups(values: Tensor) -> Tensor:
    """float32 [groups, 32], the last group filled with zeros."""
    padding = -values.numel() % GROUP
    return torch.nn.functional.pad(values.float(), (0, padding)).view(-1, GROUP)


def _codes(values: Tensor, *, kind: str) -> tuple[Tensor, Tensor, int]:
    """(codes float32 [groups, 32], scales bfloat16 [groups], number of groups that do not decode to `values` [groups, 32])."""
    largest = (values.abs() if kind == "m" else values.sqrt()).amax(dim=1)
    bits = (largest.view(torch.int32) + 0xFFFF) & 0x7FFF0000  # rounded up to a bfloat16, as the update rounds
    scale = bits.view(torch.float32).bfloat16()
    code = _nearest(values, scale=scale, kind=kind)
    if values.is_meta:
        return code, scale, 0
    wrong = (_decoded(code, scale=scale, kind=kind) != values).any(dim=1).nonzero()[:, 0]
    for top in range(_TOP[kind], 0, -1):
        tried = wrong if top > _TOP[kind] - _SLACK else wrong[largest[wrong] < _TINY]
        if not len(tried):
            break
        for guess in _scales(largest[tried], top=top, kind=kind):
            found = _nearest(values[tried], scale=guess, kind=kind)
            exact = (_decoded(found, scale=guess, kind=kind) == values[tried]).all(dim=1)
            code[tried[exact]], scale[tried[exact]] = found[exact], guess[exact]
            wrong = wrong[~torch.isin(wrong, tried[exact])]
    return code, scale, len(wrong)


def _scales(largest: Tensor, *, top: int, kind: str) -> Iterator[Tensor]:
    """bfloat16 [groups]: candidate scales if the largest number of a group has the code `top`. Below float32's normal range the number has
    few bits, and the scale may be a neighbour."""
    nearest = (largest.double() * (_TOP[kind] / top) ** (2 if kind == "m" else 1)).bfloat16()
    yield nearest
    if bool((largest < _TINY).any()):
        for step in (-1, 1):
            yield (nearest.view(torch.int16) + step).clamp_min_(0).view(torch.bfloat16)


def _decoded(code: Tensor, *, scale: Tensor, kind: str) -> Tensor:
    """float32 [groups, 32], as the update decodes."""
    m, v = decode_moments(code_m=code.view(-1), code_v=code.view(-1), scale_m=scale, scale_v=scale)
    return (m if kind == "m" else v).view_as(code)


def _nearest(values: Tensor, *, scale: Tensor, kind: str) -> Tensor:
    """The codes float32 [groups, 32] whose numbers are nearest to `values`; never 0 for a second moment above 0."""
    divisor = scale.double()[:, None]
    share = torch.where(divisor > 0, values.abs().double() / (divisor if kind == "m" else divisor.square()), 0.0)
    code = (share.sqrt() * _TOP[kind]).round().clamp_max(_TOP[kind]).float()
    return torch.where(values < 0, -code, code) if kind == "m" else torch.maximum(code, (values > 0).float())
