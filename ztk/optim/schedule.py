"""Learning rate multipliers of a whole run, as a table: the step's control kernel looks its own up on the device.

The formulas are those of DeepSpeed's schedules of the same purpose, t counting updates from 0, W = `warmup_steps`,
T = `total_steps`, s = `warmup_start`, f = `final`:

* warm-up, t < W: s + (1 - s) g(t), with g(t) = t / W (linear) or ln(t + 1) / ln(W) (log)
* constant (WarmupLR), t >= W: 1
* linear (WarmupDecayLR), t >= W: f + (1 - f) max(0, (T - t) / max(1, T - W))
* cosine (WarmupCosineLR), t >= W: f + (1 - f) (1 + cos(pi p)) / 2, p = min(1, (t - W + 1) / max(1, T - W))
* one_cycle (OneCycle): from `start` up to 1 in `rise_steps`, back in `fall_steps`, then start / (1 + decay_rate n), n
  in units of `decay_interval`; Smith 2018, https://arxiv.org/abs/1803.09820
* range_test (LRRangeTest): 1 + step_rate t / step_size, in whole steps of it with `staircase`

DeepSpeed's engine makes its first update before the first step of a warm-up schedule, so there update t + 1 has what is
entry t here; one_cycle and range_test agree entry by entry.
"""

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

_WARMUP = ("warmup_steps", "warmup_shape", "warmup_start")
_DECAY = (*_WARMUP, "final", "total_steps")
_CYCLE = ("start", "rise_steps", "fall_steps", "rise_stairs", "fall_stairs", "decay_rate", "decay_interval")
# Schedule -> the options it has.
SCHEDULES = {
    "constant": _WARMUP,
    "linear": _DECAY,
    "cosine": _DECAY,
    "one_cycle": _CYCLE,
    "range_test": ("step_size", "step_rate", "staircase"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulePolicy:
    """How the learning rate moves. Multiplier 1 is the optimizer's `lr`: the rate after warm-up, the peak of a cycle,
    the start of a range test.

    warmup_steps: 0 for none; one_cycle and range_test warm up by themselves.
    warmup_shape: linear, or log (needs two steps).
    warmup_start: the first multiplier; None means 1 / warmup_steps, so that no update is made with rate 0.
    final: what linear and cosine end at. total_steps: where they end; None means with the run.
    start, rise_steps, fall_steps: one_cycle's lowest multiplier and half cycles; fall_steps None means rise_steps.
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
        self._check_ranges()

    def _check_ranges(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"scheduler.warmup_steps={self.warmup_steps}: must be 0 or more")
        if self.warmup_shape not in ("linear", "log"):
            raise ValueError(f"scheduler.warmup_shape={self.warmup_shape}: must be linear or log")
        if self.warmup_shape == "log" and self.warmup_steps < 2:
            raise ValueError(
                f"scheduler.warmup_shape=log needs scheduler.warmup_steps=2 or more (have {self.warmup_steps})"
            )
        if self.warmup_start is not None and self.warmup_steps == 0:
            raise ValueError(f"scheduler.warmup_start={self.warmup_start} has no effect without scheduler.warmup_steps")
        for key in ("warmup_start", "final", "start"):
            value = getattr(self, key)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"scheduler.{key}={value}: a multiplier of optimizer.lr, must lie from 0 to 1")
        for key in ("total_steps", "rise_steps", "fall_steps", "step_size"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"scheduler.{key}={value}: must be 1 step or more")
        for key in ("rise_stairs", "fall_stairs", "decay_rate", "decay_interval"):
            value = getattr(self, key)
            if value is not None and value < 0:
                raise ValueError(f"scheduler.{key}={value}: must be 0 or more")
        if bool(self.decay_rate) != bool(self.decay_interval):
            raise ValueError(
                f"scheduler.decay_rate={self.decay_rate} and scheduler.decay_interval={self.decay_interval}: one "
                "has no effect without the other; set both or neither"
            )
        if not self.step_rate > 0:
            raise ValueError(f"scheduler.step_rate={self.step_rate}: must be above 0, or the rate does not move")


def lr_table(policy: SchedulePolicy, *, steps: int) -> Tensor:
    """Float32 [steps]: entry t multiplies `optimizer.lr` in update t. Skipped steps are not updates.

    A run shorter than the warm-up ends within it.
    """
    if steps < 1:
        raise ValueError(f"train.steps={steps}: must be 1 or more")
    return torch.tensor([lr_multiplier(policy, step=t, steps=steps) for t in range(steps)], dtype=torch.float32)


def lr_multiplier(policy: SchedulePolicy, *, step: int, steps: int) -> float:
    """Entry `step` of the table of a run of `steps` updates, before it is rounded to float32."""
    formula = {"one_cycle": _one_cycle, "range_test": _range_test}.get(policy.name, _warm_then_decay)
    return formula(policy, t=step, steps=steps)


def _warm_then_decay(policy: SchedulePolicy, *, t: int, steps: int) -> float:
    warmup, final = policy.warmup_steps, policy.final
    if t < warmup:
        start = 1 / warmup if policy.warmup_start is None else policy.warmup_start
        gamma = t / warmup if policy.warmup_shape == "linear" else math.log(t + 1) / math.log(warmup)
        return start + (1 - start) * gamma
    total = steps if policy.total_steps is None else policy.total_steps
    decaying = max(1, total - warmup)
    if policy.name == "linear":
        return final + (1 - final) * max(0.0, (total - t) / decaying)
    if policy.name == "cosine":
        return final + (1 - final) * (1 + math.cos(math.pi * min(1.0, (t - warmup + 1) / decaying))) / 2
    return 1.0


def _one_cycle(policy: SchedulePolicy, *, t: int, steps: int) -> float:
    del steps
    rise = policy.rise_steps
    fall = rise if policy.fall_steps is None else policy.fall_steps
    if t > rise + fall:
        intervals = (t - rise - fall) / policy.decay_interval if policy.decay_interval else 0.0
        return policy.start / (1 + policy.decay_rate * intervals)
    rising = t <= rise
    climbed = t / rise if rising else (rise + fall - t) / fall
    stairs = policy.rise_stairs if rising or policy.fall_stairs is None else policy.fall_stairs
    if stairs:
        # From integers: a quotient a hair below a whole stair would lose the stair.
        climbed = (t * stairs // rise if rising else (rise + fall - t) * stairs // fall) / stairs
    return policy.start + (1 - policy.start) * climbed


def _range_test(policy: SchedulePolicy, *, t: int, steps: int) -> float:
    del steps
    return 1 + policy.step_rate * (t // policy.step_size if policy.staircase else t / policy.step_size)
