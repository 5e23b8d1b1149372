"""The rank that the others wait for, found by its own seconds: the time in phases in which a rank waits for no other."""

from dataclasses import dataclass

from torch import Tensor

from ztk.core.policies.machine import place_of

OWN_PHASES = ("forward", "backward", "optimizer", "io")  # not "communication" and "bubble"


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowest:
    """The rank with the most own seconds. ratio: to the median of all ranks. phase: the one that is furthest above its median."""

    rank: int
    ratio: float
    phase: str

    @staticmethod
    def of(seconds: Tensor) -> "Slowest | None":
        """seconds: [ranks, phases of `OWN_PHASES`] in host memory. None for a single rank, and if the median is zero."""
        own = seconds.sum(1)
        median = float(own.quantile(0.5))
        if len(own) < 2 or median <= 0:
            return None
        rank = int(own.argmax())
        excess = seconds[rank] - seconds.quantile(0.5, dim=0)
        return Slowest(rank=rank, ratio=float(own[rank]) / median, phase=OWN_PHASES[int(excess.argmax())])


class SlowestRank:
    """Adds up the seconds of the rows since the last line. every: rows between lines; 0 for none."""

    def __init__(self, *, every: int) -> None:
        self._every, self._rows = every, 0
        self._seconds: Tensor | None = None

    def add(self, seconds: Tensor) -> tuple[dict[str, float], str]:
        """Returns the row's columns, and the line if one is due, else "". seconds: the argument of `Slowest.of` since the last row."""
        found = Slowest.of(seconds)
        columns = {} if found is None else {"slowest_rank": found.rank, "slowest_ratio": found.ratio}
        self._seconds = seconds if self._seconds is None else self._seconds + seconds
        self._rows += 1
        if not self._every or self._rows < self._every:
            return columns, ""
        found, rows = Slowest.of(self._seconds), self._rows
        self._seconds, self._rows = None, 0
        if found is None:
            return columns, ""
        return columns, (
            f"the slowest rank of the last {rows} rows is {place_of(found.rank)}: {found.ratio:.2f} times the median's own seconds, most in "
            f"{found.phase}"
        )


def own_seconds(flows: dict[str, float]) -> list[float]:
    """Seconds of `OWN_PHASES` in a difference of `Gauges.flows`."""
    return [flows[f"seconds.{phase}"] for phase in OWN_PHASES]
