"""The learning rate multipliers of a run as a table, from which the control kernel reads one entry per step.

The formulas equal DeepSpeed's schedules of the same purpose. t counts updates from 0, W = `warmup_steps`,
T = `total_steps`, s = `warmup_start`, f = `final`:

* warm-up, t < W: s + (1 - s) g(t), with g(t) = t / W (linear) or ln(t + 1) / ln(W) (log)
* constant (WarmupLR), t >= W: 1
* linear (WarmupDecayLR), t >= W: f + (1 - f) max(0, (T - t) / max(1, T - W))
* cosine (WarmupCosineLR), t >= W: f + (1 - f) (1 + cos(pi p)) / 2, p = min(1, (t - W + 1) / max(1, T - W))
* wsd (warm-up, stable, decay; Hu et al. 2024, https://arxiv.org/abs/2404.06395; not DeepSpeed's), D = `decay_steps`: 1 until
  t = T - D, then with p = min(1, (t - (T - D) + 1) / D), by `decay_shape`: linear: 1 - (1 - f) p; cosine: f + (1 - f) (1 + cos(pi p)) / 2;
  sqrt: 1 - (1 - f) sqrt(p) (Haegele et al. 2024, https://arxiv.org/abs/2405.18392); exponential: f^p (Hu's). The last update has f
* one_cycle (OneCycle): from `start` up to 1 in `rise_steps`, back in `fall_steps`, then start / (1 + decay_rate n), n
  in units of `decay_interval`; Smith 2018, https://arxiv.org/abs/1803.09820
* range_test (LRRangeTest): 1 + step_rate t / step_size, floored with `staircase`

DeepSpeed's engine makes its first update before the first step of a warm-up schedule, so its update t + 1 has
entry t of this table; one_cycle and range_test agree entry by entry.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ztk.core.policies.ranges import COUNT
from ztk.core.policies.schedule import SchedulePolicy, wsd_steps


def lr_table(policy: SchedulePolicy, *, steps: int) -> Tensor:
    """Float32 [steps]: entry t multiplies `optimizer.lr` in update t. Skipped steps are not updates.

    A run shorter than the warm-up ends within it. Raises ValueError for `steps` out of range.
    """
    if reason := COUNT.fault(steps):
        raise ValueError(f"train.steps={steps}: {reason}")
    return torch.tensor([lr_multiplier(policy, step=t, steps=steps) for t in range(steps)], dtype=torch.float32)


def lr_multiplier(policy: SchedulePolicy, *, step: int, steps: int) -> float:
    """Entry `step` of the table of a run of `steps` updates, before rounding to float32."""
    formula = {"one_cycle": _one_cycle, "range_test": _range_test}.get(policy.name, _warm_then_decay)
    return formula(policy, t=step, steps=steps)


def _warm_then_decay(policy: SchedulePolicy, *, t: int, steps: int) -> float:
    warmup, final = policy.warmup_steps, policy.final
    if t < warmup:
        start = 1 / warmup if policy.warmup_start is None else policy.warmup_start
        gamma = t / warmup if policy.warmup_shape == "linear" else math.log(t + 1) / math.log(warmup)
        return start + (1 - start) * gamma
    total = steps if policy.total_steps is None else policy.total_steps
    if policy.name == "wsd":
        return _stable_then_decay(policy, t=t, total=total)
    decaying = max(1, total - warmup)
    if policy.name == "linear":
        return final + (1 - final) * max(0.0, (total - t) / decaying)
    if policy.name == "cosine":
        return final + (1 - final) * (1 + math.cos(math.pi * min(1.0, (t - warmup + 1) / decaying))) / 2
    return 1.0


def _stable_then_decay(policy: SchedulePolicy, *, t: int, total: int) -> float:
    steps = wsd_steps(policy.decay_steps, end=total)
    stable = total - steps
    if t < stable:
        return 1.0
    final, p = policy.final, min(1.0, (t - stable + 1) / steps)
    if policy.decay_shape == "exponential":
        return final**p
    if policy.decay_shape == "cosine":
        return final + (1 - final) * (1 + math.cos(math.pi * p)) / 2
    return 1 - (1 - final) * (math.sqrt(p) if policy.decay_shape == "sqrt" else p)


def _one_cycle(policy: SchedulePolicy, *, t: int, steps: int) -> float:
    del steps
    rise = policy.rise_steps
    fall = rise if policy.fall_steps is None else policy.fall_steps
    if t >= rise + fall:
        intervals = (t - rise - fall) / policy.decay_interval if policy.decay_interval else 0.0
        return policy.start / (1 + policy.decay_rate * intervals)
    rising = t <= rise
    climbed = t / rise if rising else (rise + fall - t) / fall
    stairs = policy.rise_stairs if rising or policy.fall_stairs is None else policy.fall_stairs
    if stairs:
        # In integers: a quotient slightly below an integer would lose one stair.
        climbed = (t * stairs // rise if rising else (rise + fall - t) * stairs // fall) / stairs
    return policy.start + (1 - policy.start) * climbed


def _range_test(policy: SchedulePolicy, *, t: int, steps: int) -> float:
    del steps
    return 1 + policy.step_rate * (t // policy.step_size if policy.staircase else t / policy.step_size)


class GroupSchedule:
    """The values that a torch scheduler sets in the groups of an optimizer, by update.

    The scheduler runs over copies of the groups, so it needs no state in a checkpoint and skipped steps do not count.
    """

    def __init__(
        self,
        make: Callable[[torch.optim.Optimizer], Any],
        *,
        groups: Sequence[Mapping[str, Any]],
        defaults: Mapping[str, Any],
    ) -> None:
        """make: builds the scheduler for an optimizer. groups: values of each parameter group. defaults: the optimizer's.

        Raises ValueError for a scheduler whose step requires an argument.
        """
        self._make, self._defaults = make, dict(defaults)
        self._groups = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self._begin()

    def _begin(self) -> None:
        groups = [{**_copied(group), "params": [nn.Parameter(torch.zeros(1))]} for group in self._groups]
        self._optimizer = _Idle(groups, dict(self._defaults))
        self._scheduler, self._update = self._make(self._optimizer), 1
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError(
                "ReduceLROnPlateau follows a measured loss, and a schedule here depends on the step alone: use another scheduler, or set the "
                "rate in a callback"
            )

    def values(self, update: int) -> list[dict[str, Any]]:
        """Per group, the values of its options in update `update`, from 1 on."""
        if update < self._update:
            self._begin()
        while self._update < update:
            self._optimizer.step()
            self._scheduler.step()
            self._update += 1
        return [
            {key: _plain(group[key]) for key in before}
            for group, before in zip(self._optimizer.param_groups, self._groups, strict=True)
        ]


class _Idle(torch.optim.Optimizer):
    """Holds groups for a scheduler."""

    def step(self, closure: Any = None) -> None:
        """Does nothing."""


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}


def _plain(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
