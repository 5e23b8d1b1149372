"""The learning-rate schedule."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from ztk.core.policies.key import chosen, key, key_faults, section, within
from ztk.core.policies.ranges import (
    COUNT,
    COUNT_OR_ZERO,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    member,
    refuse,
)

if TYPE_CHECKING:
    from ztk.core.policies.config import Config


class SchedulerName(StrEnum):
    """scheduler.name: the learning-rate schedule."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"
    one_cycle = "one_cycle"
    range_test = "range_test"


class WarmupShape(StrEnum):
    """scheduler.warmup_shape: the shape of the warm-up."""

    linear = "linear"
    log = "log"


class DecayShape(StrEnum):
    """scheduler.decay_shape: how wsd decays."""

    linear = "linear"
    cosine = "cosine"
    sqrt = "sqrt"
    exponential = "exponential"


_WARMED = chosen("scheduler", "constant", "linear", "cosine", "wsd")
_DECAYED, _WSD = chosen("scheduler", "linear", "cosine", "wsd"), chosen("scheduler", "wsd")
_ONE_CYCLE, _RANGE_TEST = chosen("scheduler", "one_cycle"), chosen("scheduler", "range_test")
_WARMS_UP = within(
    "scheduler",
    words=f"{_WARMED.words} with scheduler.warmup_steps above 0",
    test=lambda scheduler: scheduler.name in ("constant", "linear", "cosine", "wsd") and scheduler.warmup_steps != 0,
)


def _log_faults(config: "Config") -> Iterator[str]:
    if config.scheduler.warmup_shape == "log" and config.scheduler.warmup_steps == 1:
        yield (
            "scheduler.warmup_shape=log needs two steps or more: use scheduler.warmup_steps=2, or "
            "scheduler.warmup_shape=linear"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulePolicy:
    """How the learning rate moves. Multiplier 1 is the optimizer's `lr`: the rate after warm-up, the peak of a cycle,
    the start of a range test.

    warmup_steps, rise_steps, step_size: numbers here. Only the command line derives them from train.steps.
    warmup_shape: log needs two steps. decay_shape: exponential needs a `final` above 0.
    fall_steps: 0 ends the cycle at the lowest multiplier, at the step of its peak.

    Raises ValueError for a value out of range and for an option that the schedule does not have.
    """

    name: str = key("the schedule", default="constant", chosen=True, line=SchedulerName)
    warmup_steps: int = key(
        "steps in which the learning rate rises; null: a twentieth of train.steps",
        default=0,
        range=COUNT_OR_ZERO,
        acts=_WARMED,
        optional=True,
    )
    warmup_shape: str = key("how it rises", default="linear", acts=_WARMS_UP, contradicts=_log_faults, line=WarmupShape)
    warmup_start: float | None = key(
        "first multiplier; null: 1 / warmup_steps", range=FRACTION, acts=_WARMS_UP, optional=True
    )
    final: float = key("multiplier at the end", default=0.0, range=FRACTION, acts=_DECAYED)
    total_steps: int | None = key(
        "step at which the decay ends; null: train.steps", range=COUNT, acts=_DECAYED, optional=True
    )
    decay_steps: int | None = key(
        "steps of wsd's decay, the last ones; null: a tenth of the steps", range=COUNT, acts=_WSD, optional=True
    )
    decay_shape: str = key(
        "how wsd decays: linear; cosine: half a cosine; sqrt: 1 - square root, steep first; exponential: by the same factor per step",
        default="linear",
        acts=_WSD,
        contradicts=lambda config: shape_faults(shape=config.scheduler.decay_shape, final=config.scheduler.final),
        line=DecayShape,
    )
    start: float = key("lowest multiplier", default=0.1, range=FRACTION, acts=_ONE_CYCLE)
    rise_steps: int = key(
        "steps up; null: half of train.steps", default=2000, range=COUNT, acts=_ONE_CYCLE, optional=True
    )
    fall_steps: int | None = key("steps down; null: as rise_steps", range=COUNT_OR_ZERO, acts=_ONE_CYCLE, optional=True)
    rise_stairs: int = key("stairs on the way up; 0: a slope", default=0, range=COUNT_OR_ZERO, acts=_ONE_CYCLE)
    fall_stairs: int | None = key(
        "stairs on the way down; null: as rise_stairs", range=COUNT_OR_ZERO, acts=_ONE_CYCLE, optional=True
    )
    decay_rate: float = key(
        "after the cycle the rate is divided by 1 + decay_rate per decay_interval steps; 0: it is not",
        default=0.0,
        range=NOT_NEGATIVE,
        acts=_ONE_CYCLE,
        contradicts=lambda config: decay_faults(
            rate=config.scheduler.decay_rate, interval=config.scheduler.decay_interval
        ),
    )
    decay_interval: int = key("steps of that decay; 0: there is none", default=0, range=COUNT_OR_ZERO, acts=_ONE_CYCLE)
    step_size: int = key(
        "steps in which the multiplier grows by step_rate; null: a tenth of train.steps",
        default=2000,
        range=COUNT,
        acts=_RANGE_TEST,
        optional=True,
    )
    step_rate: float = key("growth of the multiplier in step_size steps", default=1.0, range=POSITIVE, acts=_RANGE_TEST)
    staircase: bool = key("grow in jumps of step_size", default=False, acts=_RANGE_TEST)

    def __post_init__(self) -> None:
        member(self.name, of=SchedulerName, key="scheduler.name")
        member(self.warmup_shape, of=WarmupShape, key="scheduler.warmup_shape")
        member(self.decay_shape, of=DecayShape, key="scheduler.decay_shape")
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        yield from key_faults(self, section="scheduler")
        if self.warmup_shape == "log" and self.warmup_steps < 2:
            yield f"scheduler.warmup_shape=log needs scheduler.warmup_steps=2 or more (have {self.warmup_steps})"
        yield from decay_faults(rate=self.decay_rate, interval=self.decay_interval)
        yield from shape_faults(shape=self.decay_shape, final=self.final)
        if self.total_steps is not None:
            steps = wsd_steps(self.decay_steps, end=self.total_steps) if self.name == "wsd" else 0
            yield from room_faults(warmup=self.warmup_steps, decay=steps, end=self.total_steps)


@section
class SchedulerConfig(SchedulePolicy):
    """The learning rate over the optimizer steps, as multiples of optimizer.lr."""


def wsd_steps(given: int | None, *, end: int) -> int:
    """Steps of wsd's decay in a schedule that ends after `end` steps."""
    return max(1, end // 10) if given is None else given


def shape_faults(*, shape: str | None, final: float | None) -> Iterator[str]:
    """An exponential never reaches zero."""
    if shape == "exponential" and final == 0:
        yield "scheduler.decay_shape=exponential never reaches scheduler.final=0: use scheduler.final=0.1, or scheduler.decay_shape=linear"


def room_faults(*, warmup: int, decay: int, end: int) -> Iterator[str]:
    """wsd's warm-up and decay must not overlap. decay: 0 for a schedule without one."""
    if decay and warmup + decay > end > warmup:
        yield (
            f"scheduler.decay_steps={decay} and scheduler.warmup_steps={warmup} are more than the {end} steps of the schedule: use "
            f"scheduler.decay_steps={end - warmup}"
        )


def decay_faults(*, rate: float | None, interval: int | None) -> Iterator[str]:
    """one_cycle's decay has a rate and an interval in steps, or neither."""
    if bool(rate) != bool(interval):
        yield (
            f"scheduler.decay_rate={rate:g} and scheduler.decay_interval={interval}: one has no effect without the other, "
            "set both or neither"
        )
