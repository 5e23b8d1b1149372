"""Intervals of means, medians and ratios of few measurements, by `scipy.stats`."""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

CONFIDENCE = 0.95
FEWEST = 6  # measurements for an interval of the median; with five, all lie on one side with probability 1/16


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Mean and median of n measurements with their 95 % intervals, and their minimum and maximum.

    low, high: ends of the median's interval; NaN for fewer than `FEWEST` measurements, whose range contains the median in less than 95 % of
    all cases. standard_error, mean_low, mean_high: the mean's error and interval, by Student's t; NaN for one measurement.
    """

    median: float
    low: float
    high: float
    n: int
    smallest: float
    largest: float
    mean: float
    standard_error: float
    mean_low: float
    mean_high: float

    @property
    def ends(self) -> str:
        """The 95 % interval of the median as text; for fewer than `FEWEST` measurements, their number and range."""
        if self.n >= FEWEST:
            return f"{self.low:.5g} to {self.high:.5g}"
        return f"none (n = {self.n}" + (f", all in {self.smallest:.5g} to {self.largest:.5g})" if self.n > 1 else ")")

    @property
    def mean_ends(self) -> str:
        """The 95 % t-interval of the mean as text."""
        return f"{self.mean_low:.5g} to {self.mean_high:.5g}" if self.n > 1 else f"none (n = {self.n})"

    @property
    def excludes_one(self) -> bool:
        """Whether a ratio differs from 1: its median's interval excludes 1, or for fewer than `FEWEST` measurements its mean's."""
        low, high = (self.low, self.high) if self.n >= FEWEST else (self.mean_low, self.mean_high)
        return low > 1 or high < 1


def median_interval(values: Sequence[float]) -> Interval:
    """Returns mean and median of `values` with their 95 % intervals.

    The median's interval has two of the sorted values as its ends and assumes no distribution: the values beyond it are as few as the
    binomial distribution allows. Student's t assumes a normal one.

    Raises:
        ValueError: there is no value, or one that is not finite.
    """
    found = numpy.asarray(values, dtype=numpy.float64)
    if len(found) == 0 or not numpy.isfinite(found).all():
        raise ValueError(
            f"values={list(values)}: one finite number or more is needed; leave out runs without the metric"
        )
    stats: Any = importlib.import_module("scipy.stats")  # here: it takes a second
    n, mean, error, mean_low, mean_high = len(found), float(found.mean()), math.nan, math.nan, math.nan
    if n > 1:
        error = float(stats.sem(found))
        mean_low, mean_high = (mean + float(end) * error for end in stats.t.interval(CONFIDENCE, n - 1))
    low = high = math.nan
    if n >= FEWEST:
        low, high = map(float, stats.quantile_test(found, p=0.5).confidence_interval(confidence_level=CONFIDENCE))
    return Interval(
        median=float(numpy.median(found)),
        low=low,
        high=high,
        n=n,
        smallest=float(found.min()),
        largest=float(found.max()),
        mean=mean,
        standard_error=error,
        mean_low=mean_low,
        mean_high=mean_high,
    )


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
