"""Times of ztk's ops in rows: `kernel.NAME.ms`, `.calls`, `.gb_per_s` and `.share_of_floor`, for one step in `every`.

A step's period begins after the report of the previous step and ends with its own report, without pauses such as validations. With
several ranks, an op's time is the longest over the ranks. If the optimizer overlaps with the next forward (stage 3 with offloaded
states), a step includes the update that runs after its own forward, which belongs to the previous step.
"""

import math
import statistics
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from ztk.kernels import Ceilings, KernelTime, KernelTimes, op_names
from ztk.report.gauges import Gather

FIELDS = ("ms", "calls", "gb_per_s", "share_of_floor")
_NUMBERS = ("seconds", "calls", "num_bytes", "floor_seconds")  # exchanged between ranks for every op


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelPolicy:
    """every: interval between timed steps; 0 for none. ceilings: peak rates of this device. If omitted, rows have no `share_of_floor`.

    Raises:
        ValueError: `every` is negative.
    """

    every: int = 0
    ceilings: Ceilings | None = None

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(
                f"kernels.log_every={self.every}: must be 0, for none, or the steps between two that are timed"
            )


class KernelLog:
    """Times the steps that are due and accumulates the results for the end of the run."""

    def __init__(self, policy: KernelPolicy, *, gather: Gather, device: torch.device) -> None:
        self._every, self._gather, self._device = policy.every, gather, device
        self._times = KernelTimes(ceilings=policy.ceilings)
        self._found: dict[str, list[dict[str, float]]] = {}  # per op, for the steps in which it ran

    def begin(self, step: int) -> None:
        """Begins the period of `step`."""
        if self._every:
            self._times.begin(current=self.is_due(step), following=self.is_due(step + 1))

    def is_due(self, step: int) -> bool:
        """Returns whether the step's ops are timed."""
        return self._every > 0 and step % self._every == 0

    def end(self) -> None:
        """Ends the period."""
        self._times.end()

    def aside(self) -> AbstractContextManager[None]:
        """Excludes the ops inside."""
        return self._times.aside()

    def close(self) -> None:
        """Stops all timing."""
        self._times.close()

    def read(self) -> dict[str, float]:
        """Returns the keys of the period's row, the same on every rank. A collective call, which waits for the device once."""
        own = self._times.read()
        numbers = torch.tensor([_numbers(own.get(name)) for name in op_names()], dtype=torch.float64).flatten()
        ranks = self._gather(numbers.to(self._device)).cpu().unflatten(1, (-1, len(_NUMBERS)))
        slowest = ranks.gather(0, ranks[:, :, :1].argmax(0, keepdim=True).expand(-1, -1, len(_NUMBERS)))[0].tolist()
        values = {name: _values(*found) for name, found in sorted(zip(op_names(), slowest, strict=True)) if found[1]}
        for name, found in values.items():
            self._found.setdefault(name, []).append(found)
        return _flat(values)

    def means(self) -> dict[str, dict[str, float]]:
        """Returns the means per op over the timed steps in which it ran, longest first."""
        found = {
            name: {
                field: statistics.fmean(values)
                for field in FIELDS
                if (values := [step[field] for step in steps if field in step])
            }
            for name, steps in self._found.items()
        }
        return dict(sorted(found.items(), key=lambda item: -item[1]["ms"]))

    def summary(self) -> dict[str, float]:
        """Returns the keys of `summary.json`."""
        return _flat(self.means())


def _numbers(time: KernelTime | None) -> tuple[float, ...]:
    """Returns the values of `_NUMBERS`, all zero without calls."""
    if time is None:
        return (0.0,) * len(_NUMBERS)
    return time.seconds, time.calls, time.num_bytes, math.nan if time.floor_seconds is None else time.floor_seconds


def _values(seconds: float, calls: float, num_bytes: float, floor_seconds: float) -> dict[str, float]:
    """Returns a row's values. Rate and share are missing if no time was measured."""
    values = {"ms": 1e3 * seconds, "calls": calls}
    if seconds > 0:
        values["gb_per_s"] = num_bytes / seconds / 1e9
        if not math.isnan(floor_seconds):
            values["share_of_floor"] = floor_seconds / seconds
    return values


def _flat(values: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {f"kernel.{name}.{field}": value for name, found in values.items() for field, value in found.items()}
