"""The position of every element in the model, which selects its bits for stochastic rounding.

A position depends on the names and full shapes of a unit's parameters and on their groups, so the bits of a step are the same for every
stage, tier, bucket size and number of ranks. A unit starts at a hash of its name, so that pipeline stages need not communicate. A
parameter of the root, or one with copies on other stages, starts at a hash of its own name. A cut parameter counts from its first element
in the full one; if it is cut along its first dimension, all elements have the positions of the full parameter. All starts are multiples of
`PARAMETER_ALIGNMENT`, a group of 8-bit states.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod

from ztk.core.runtime.part import Part
from ztk.zero.buckets.layout import PARAMETER_ALIGNMENT
from ztk.zero.buckets.units import ROOT, UnitPlan


def first_positions(
    units: Sequence[UnitPlan],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    row_of: Mapping[str, int],
    parts: Mapping[str, Part],
) -> dict[str, int]:
    """Trained parameter -> the position of its first element.

    shapes: the shape of this rank's part of each parameter. row_of: the group of each trained parameter.
    """
    positions: dict[str, int] = {}
    for unit in units:
        names = sorted((name for name in unit.owned if name in row_of), key=lambda name: row_of[name])
        found = {name: parts.get(name) or Part.everything(shapes[name]) for name in names}
        sizes = [_aligned(prod(part.full_shape) + PARAMETER_ALIGNMENT - 1) for part in found.values()]
        for (name, part), offset in zip(found.items(), accumulate(sizes, initial=0), strict=False):
            is_alone = unit.name == ROOT or bool(part.holders)
            start = _hash(name) if is_alone else _hash(unit.name) + offset
            positions[name] = start + _aligned(_first_element(part))
    return positions


def _hash(name: str) -> int:
    """Below 2^62, a multiple of `PARAMETER_ALIGNMENT`."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return _aligned(int.from_bytes(digest, "big") >> 2)


def _first_element(part: Part) -> int:
    """The position of the part's first element in the flattened full parameter."""
    strides = (prod(part.full_shape[axis + 1 :]) for axis in range(len(part.full_shape)))
    return sum(first * stride for first, stride in zip(part.start, strides, strict=True))


def _aligned(number: int) -> int:
    return number // PARAMETER_ALIGNMENT * PARAMETER_ALIGNMENT
