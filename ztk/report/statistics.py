"""Intervals of medians and ratios of few measurements."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

CONFIDENCE = 0.95
FEWEST = 6  # pairs; with five, all lie on one side with probability 1/16
_DRAWS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """The median of n measurements, its 95 % interval, and their minimum and maximum.

    low, high: ends of the 95 % interval. NaN for fewer than `FEWEST` measurements, whose range contains the median in less than 95 % of
    all cases.
    """

    median: float
    low: float
    high: float
    n: int
    smallest: float
    largest: float

    @property
    def ends(self) -> str:
        """The 95 % interval as text; for fewer than `FEWEST` measurements, their number and range."""
        if self.n >= FEWEST:
            return f"{self.low:.5g} to {self.high:.5g}"
        return f"none (n = {self.n}" + (f", all in {self.smallest:.5g} to {self.largest:.5g})" if self.n > 1 else ")")

    @property
    def excludes_one(self) -> bool:
        """Whether a ratio differs from 1. Always False for fewer than six measurements."""
        return self.n >= FEWEST and (self.low > 1 or self.high < 1)


def median_interval(values: Sequence[float]) -> Interval:
    """Returns the expanded percentile interval of the bootstrap, with the tail probabilities of Student's t for n - 1 degrees of freedom.

    Plain percentiles are too narrow for few measurements: in 1,500 pairs of equal arms with n = 10 they find differences in 5 to 11 %,
    and expanded ones in 3 to 4 %. The draws use a fixed seed, so the same values give the same interval. Source: Hesterberg, What
    Teachers Should Know About the Bootstrap, 2014, section 3.4.

    Raises:
        ValueError: there is no value, or one that is not finite.
    """
    found = numpy.asarray(values, dtype=numpy.float64)
    if len(found) == 0 or not numpy.isfinite(found).all():
        raise ValueError(
            f"values={list(values)}: one finite number or more is needed; leave out runs without the metric"
        )
    median, n = float(numpy.median(found)), len(found)
    span = {"smallest": float(found.min()), "largest": float(found.max())}
    if n < FEWEST:
        return Interval(median=median, low=math.nan, high=math.nan, n=n, **span)
    picked = numpy.random.default_rng(0).integers(0, n, (_DRAWS, n))
    medians = numpy.median(found[picked], axis=1)
    tail = statistics.NormalDist().cdf(-math.sqrt(n / (n - 1)) * _student((1 + CONFIDENCE) / 2, degrees=n - 1))
    low, high = numpy.quantile(medians, [tail, 1 - tail])
    return Interval(median=median, low=float(low), high=float(high), n=n, **span)


def ratio_interval(values: Sequence[float], *, baseline: Sequence[float]) -> Interval:
    """Returns the interval of the ratios values[i] / baseline[i] of pairs that were measured one after the other.

    Raises:
        ValueError: there is no pair, the lengths differ, or a ratio is not finite.
    """
    if len(values) != len(baseline):
        raise ValueError(f"values={len(values)} and baseline={len(baseline)} measurements: pairs need as many of each")
    return median_interval(
        [value / other if other else math.nan for value, other in zip(values, baseline, strict=True)]
    )


def _student(probability: float, *, degrees: int) -> float:
    """Returns a quantile of Student's t, exact for 1 and 2 degrees of freedom, else within 0.5 % (Cornish-Fisher)."""
    if degrees == 1:
        return math.tan(math.pi * (probability - 0.5))
    if degrees == 2:
        return (2 * probability - 1) * math.sqrt(2 / (4 * probability * (1 - probability)))
    z = statistics.NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3
