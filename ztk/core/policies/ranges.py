"""Ranges of numbers, and the message for a number outside of its range."""

import math
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
_Words = TypeVar("_Words", bound=StrEnum)
_FAR_ENDS = (None, INT32_MAX, INT64_MAX)


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Finite numbers from `low` to `high`; `below` leaves `high` itself out, `above` leaves `low` out, and `zero` lets 0 in.

    float32: kernels read the number in float32. It must lie in the range after that rounding too, and must not become 0 or infinite. words:
    replaces the description in help, where other rules narrow the range.
    """

    low: float
    high: float | None = None
    above: bool = False
    below: bool = False
    zero: bool = False
    float32: bool = False
    words: str = ""

    def fault(self, value: float) -> str:
        """Why `value` is refused, starting with "must be"; "" if it is accepted."""
        if not self._holds(value):
            return f"must be {self}"
        if not self.float32:
            return ""
        rounded = rounded_to_float32(value)
        if math.isinf(rounded) or (rounded == 0) != (value == 0) or not self._holds(rounded):
            return f"must be {self}, also in float32, where it becomes {rounded:g}"
        return ""

    def _holds(self, value: float) -> bool:
        if isinstance(value, float) and not math.isfinite(value):
            return False
        if self.zero and value == 0:
            return True
        if value < self.low or (self.above and value == self.low):
            return False
        return self.high is None or value < self.high or (value == self.high and not self.below)

    @property
    def brief(self) -> str:
        """The range in words, without an upper end far beyond useful values."""
        if self.words:
            return self.words
        return str(replace(self, high=None)).removesuffix(" and finite") if self.high in _FAR_ENDS else str(self)

    def __str__(self) -> str:
        low = f"above {_plain(self.low)}" if self.above else f"{_plain(self.low)} or more"
        low = f"0, or {low}" if self.zero else low
        high = "finite" if self.high is None else f"{'below' if self.below else 'at most'} {_plain(self.high)}"
        return f"{low} and {high}"


COUNT = Range(low=1, high=INT32_MAX)
COUNT_OR_ZERO = Range(low=0, high=INT32_MAX)
SIZE = Range(low=1, high=INT64_MAX)  # elements or bytes
SIZE_OR_ZERO = Range(low=0, high=INT64_MAX)
FRACTION = Range(low=0, high=1, float32=True)
PART = Range(low=0, high=1)
POSITIVE = Range(low=0, above=True, float32=True)
NOT_NEGATIVE = Range(low=0, float32=True)
BELOW_ONE = Range(low=0, high=1, below=True, float32=True)


def rounded_to_float32(value: float) -> float:
    """`value` rounded to float32: infinite if it is too large."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def member(word: str, *, of: type[_Words], key: str, otherwise: str = "") -> _Words:
    """The member of an enumeration. otherwise: ends the message, as in ", or null". Raises ValueError for a word that is none."""
    try:
        return of(word)
    except ValueError:
        raise ValueError(f"{key}={word}: must be one of {', '.join(of)}{otherwise}") from None


def pattern_faults(pattern: str | None, *, key: str) -> Iterator[str]:
    """The fault of a regular expression that is none."""
    try:
        re.compile(pattern or "")
    except re.error as error:
        yield f"{key}={pattern!r}: not a regular expression ({error})"


def shown(value: object) -> str:
    """A value in a message: digits as given, unless there are very many."""
    text = str(value)
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} digits)"


def refuse(faults: Iterable[str]) -> None:
    """Raises ValueError with the first of `faults`, if there is one."""
    for fault in faults:
        raise ValueError(fault)


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"
