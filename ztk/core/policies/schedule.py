"""How the learning rate moves."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from ztk.core.policies.ranges import COUNT, COUNT_OR_ZERO, FRACTION, NOT_NEGATIVE, POSITIVE, range_faults, refuse

_WARMUP = ("warmup_steps", "warmup_shape", "warmup_start")
_DECAY = (*_WARMUP, "final", "total_steps")
_WSD = (*_DECAY, "decay_steps", "decay_shape")
_CYCLE = ("start", "rise_steps", "fall_steps", "rise_stairs", "fall_stairs", "decay_rate", "decay_interval")
DECAY_SHAPES = ("linear", "cosine", "sqrt", "exponential")
# Schedule -> the options it has.
SCHEDULES = {
    "constant": _WARMUP,
    "linear": _DECAY,
    "cosine": _DECAY,
    "wsd": _WSD,
    "one_cycle": _CYCLE,
    "range_test": ("step_size", "step_rate", "staircase"),
}
RANGES = {
    "warmup_steps": COUNT_OR_ZERO,
    "warmup_start": FRACTION,
    "final": FRACTION,
    "total_steps": COUNT,
    "decay_steps": COUNT,
    "start": FRACTION,
    "rise_steps": COUNT,
    "fall_steps": COUNT_OR_ZERO,
    "rise_stairs": COUNT_OR_ZERO,
    "fall_stairs": COUNT_OR_ZERO,
    "decay_rate": NOT_NEGATIVE,
    "decay_interval": COUNT_OR_ZERO,
    "step_size": COUNT,
    "step_rate": POSITIVE,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulePolicy:
    """How the learning rate moves. Multiplier 1 is the optimizer's `lr`: the rate after warm-up, the peak of a cycle,
    the start of a range test.

    warmup_steps: 0 for none; one_cycle and range_test warm up by themselves.
    warmup_shape: linear, or log (needs two steps).
    warmup_start: the first multiplier; None means 1 / warmup_steps, so that no update is made with rate 0.
    final: what linear, cosine and wsd end at. total_steps: where they end; None means with the run.
    decay_steps: the last steps of wsd, in which the rate falls; None means a tenth, one at least. decay_shape: linear, cosine, sqrt
        (1 - square root) or exponential, which needs a `final` above 0.
    start, rise_steps, fall_steps: one_cycle's lowest multiplier and half cycles; fall_steps None means rise_steps, 0
        ends the cycle at the lowest multiplier where its peak would be.
    rise_stairs, fall_stairs: steps of a staircase per half cycle, 0 for a slope; fall_stairs None means rise_stairs.
    decay_rate, decay_interval: one_cycle's decay after the cycle; interval 0 for none.
    step_size, step_rate, staircase: range_test's growth.

    Raises ValueError for a value out of range and for an option that the schedule does not have.
    """

    name: str = "constant"
    warmup_steps: int = 0
    warmup_shape: str = "linear"
    warmup_start: float | None = None
    final: float = 0.0
    total_steps: int | None = None
    decay_steps: int | None = None
    decay_shape: str = "linear"
    start: float = 0.1
    rise_steps: int = 2000
    fall_steps: int | None = None
    rise_stairs: int = 0
    fall_stairs: int | None = None
    decay_rate: float = 0.0
    decay_interval: int = 0
    step_size: int = 2000
    step_rate: float = 1.0
    staircase: bool = False

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ValueError(f"scheduler.name={self.name}: must be one of {', '.join(SCHEDULES)}")
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name != "name" and option.name not in SCHEDULES[self.name] and value != option.default:
                owners = " or ".join(name for name, options in SCHEDULES.items() if option.name in options)
                raise ValueError(
                    f"scheduler.{option.name}={value} has no effect with scheduler={self.name}: leave it out, or use "
                    f"scheduler={owners}"
                )
        refuse(range_faults(self, section="scheduler", ranges=RANGES))
        self._check_warmup()
        refuse(decay_faults(rate=self.decay_rate, interval=self.decay_interval))
        self._check_decay()

    def _check_warmup(self) -> None:
        if self.warmup_shape not in ("linear", "log"):
            raise ValueError(f"scheduler.warmup_shape={self.warmup_shape}: must be linear or log")
        if self.warmup_shape == "log" and self.warmup_steps < 2:
            raise ValueError(
                f"scheduler.warmup_shape=log needs scheduler.warmup_steps=2 or more (have {self.warmup_steps})"
            )
        if self.warmup_start is not None and self.warmup_steps == 0:
            raise ValueError(f"scheduler.warmup_start={self.warmup_start} has no effect without scheduler.warmup_steps")

    def _check_decay(self) -> None:
        if self.decay_shape not in DECAY_SHAPES:
            raise ValueError(f"scheduler.decay_shape={self.decay_shape}: must be one of {', '.join(DECAY_SHAPES)}")
        refuse(shape_faults(shape=self.decay_shape, final=self.final))
        if self.total_steps is not None:
            steps = wsd_steps(self.decay_steps, end=self.total_steps) if self.name == "wsd" else 0
            refuse(room_faults(warmup=self.warmup_steps, decay=steps, end=self.total_steps))


def wsd_steps(given: int | None, *, end: int) -> int:
    """Steps of wsd's decay in a schedule that ends after `end` steps."""
    return max(1, end // 10) if given is None else given


def shape_faults(*, shape: str | None, final: float | None) -> Iterator[str]:
    """An exponential never reaches zero."""
    if shape == "exponential" and final == 0:
        yield "scheduler.decay_shape=exponential never reaches scheduler.final=0: use scheduler.final=0.1, or scheduler.decay_shape=linear"


def room_faults(*, warmup: int, decay: int, end: int) -> Iterator[str]:
    """wsd's warm-up and decay lie one after the other. decay: 0 for a schedule without."""
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
