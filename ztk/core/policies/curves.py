"""Measured curves: seconds as a function of the amount of work.

Kinds: `product.DTYPE`, `grouped_product.DTYPE` (torch's, of groups of rows with a matrix each), `attention.DTYPE` (ztk's) and
`torch_attention.DTYPE` in operations; `elementwise.DTYPE` (torch's), `indexed.DTYPE` (torch's, of rows that indices or a mask name),
`fused.DTYPE` (ztk's) and the names of ztk's own operations in bytes read and written; `all_gather` and `reduce_scatter` in bytes of the
buffer of all ranks. Of the host: `request` in bytes of a request to the disk; `gradient`, and `intercepted.DTYPE` of an operation in a
block that is recomputed by choice, per piece. DTYPE is float32, bfloat16 or float16.
"""

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence

NEEDED = ("product.float32", "attention.float32", "elementwise.float32")  # stand for other dtypes and kinds
Points = Sequence[Sequence[float]]  # [amount, seconds], rising amounts


def seconds_of(points: Points, *, amount: float) -> float:
    """Interpolates by a power law between two points, and proportionally before the first and after the last."""
    place = bisect.bisect_left([point[0] for point in points], amount)
    if place in (0, len(points)):
        known, seconds = points[min(place, len(points) - 1)]
        return seconds * amount / known
    (low, first), (high, last) = points[place - 1], points[place]
    share = math.log(amount / low) / math.log(high / low)
    return first * (last / first) ** share


def scaled(curves: Mapping[str, Points], *, by: float) -> dict[str, list[list[float]]]:
    """The curves with their seconds multiplied by `by`."""
    return {kind: [[amount, seconds * by] for amount, seconds in points] for kind, points in curves.items()}


def curve_faults(curves: Mapping[str, Points]) -> Iterator[str]:
    """One line per curve without points, or with points that are not positive and rising, and one line for missing curves."""
    if curves and (missing := [kind for kind in NEEDED if kind not in curves]):
        yield f"hardware.curves: {', '.join(missing)} must be there, too"
    for kind, points in curves.items():
        amounts = [point[0] for point in points]
        if not points or amounts != sorted(set(amounts)) or min(min(point) for point in points) <= 0:
            yield f"hardware.curves: {kind} needs points [amount, seconds] of positive numbers with rising amounts"
