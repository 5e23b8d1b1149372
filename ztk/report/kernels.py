"""Times of ztk's ops in the rows: `kernel.NAME.ms`, `.calls`, `.gb_per_s` and `.share_of_floor`, of one step in `every`.

A step's period begins when the one before it was reported and ends when it is reported itself; what is aside, such as a validation, does
not count. Of several ranks each op is that of the rank on which it took longest. Where the optimizer runs behind the next forward (stage 3 with
offloaded states), a step has the update that runs behind its own forward: that of the step before.
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
_NUMBERS = ("seconds", "calls", "num_bytes", "floor_seconds")  # that ranks exchange of every op


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelPolicy:
    """every: steps between those whose ops are timed; 0: none. ceilings: of this device; None: nobody knows them, and rows have no
    `share_of_floor`.

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
    """Times the steps that are due, and keeps what it has found for the end of the run."""

    def __init__(self, policy: KernelPolicy, *, gather: Gather, device: torch.device) -> None:
        self._every, self._gather, self._device = policy.every, gather, device
        self._times = KernelTimes(ceilings=policy.ceilings)
        self._found: dict[str, list[dict[str, float]]] = {}  # by op, of the steps in which it ran

    def begin(self, step: int) -> None:
        """The period of `step` begins."""
        if self._every:
            self._times.begin(current=self.is_due(step), following=self.is_due(step + 1))

    def is_due(self, step: int) -> bool:
        """Whether the step's ops are timed."""
        return self._every > 0 and step % self._every == 0

    def end(self) -> None:
        """The period ends."""
        self._times.end()

    def aside(self) -> AbstractContextManager[None]:
        """Ops inside do not count."""
        return self._times.aside()

    def close(self) -> None:
        """No op is timed from now on."""
        self._times.close()

    def read(self) -> dict[str, float]:
        """The keys of the period's row, the same on every rank; a collective call, which waits for the device once."""
        own = self._times.read()
        numbers = torch.tensor([_numbers(own.get(name)) for name in op_names()], dtype=torch.float64).flatten()
        ranks = self._gather(numbers.to(self._device)).cpu().unflatten(1, (-1, len(_NUMBERS)))
        slowest = ranks.gather(0, ranks[:, :, :1].argmax(0, keepdim=True).expand(-1, -1, len(_NUMBERS)))[0].tolist()
        values = {name: _values(*found) for name, found in sorted(zip(op_names(), slowest, strict=True)) if found[1]}
        for name, found in values.items():
            self._found.setdefault(name, []).append(found)
        return _flat(values)

    def means(self) -> dict[str, dict[str, float]]:
        """By op, longest first: the means over the timed steps in which it ran."""
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
        """The keys of `summary.json`."""
        return _flat(self.means())


def _numbers(time: KernelTime | None) -> tuple[float, ...]:
    """As `_NUMBERS`; without calls, all are zero."""
    if time is None:
        return (0.0,) * len(_NUMBERS)
    return time.seconds, time.calls, time.num_bytes, math.nan if time.floor_seconds is None else time.floor_seconds


def _values(seconds: float, calls: float, num_bytes: float, floor_seconds: float) -> dict[str, float]:
    """Rate and share have no value where the clock saw no time."""
    values = {"ms": 1e3 * seconds, "calls": calls}
    if seconds > 0:
        values["gb_per_s"] = num_bytes / seconds / 1e9
        if not math.isnan(floor_seconds):
            values["share_of_floor"] = floor_seconds / seconds
    return values


def _flat(values: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {f"kernel.{name}.{field}": value for name, found in values.items() for field, value in found.items()}
