"""DeepSpeed's five learning rate schedules as host objects that write `param_groups`, with DeepSpeed's names, arguments and formulas.

The formulas are in `ztk.optim.schedule`; here they apply between the two bounds of a group. A warm-up schedule makes its first update
before its first step, at `warmup_min_lr` (WarmupCosineLR: 0). The engine calls `step()` after every update that was not skipped.
"""

import math
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from ztk.optim import SchedulePolicy, lr_multiplier

_NEVER = 2**62  # run length for schedules without an end, which ignore it


class _Schedule:
    """Counts updates in `last_batch_iteration` (-1: none yet) and writes the rates of every group."""

    def __init__(self, optimizer: Optimizer, *, last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._write()

    def get_lr(self) -> list[float]:
        """Returns the current rate of every group."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """Returns the rates in the optimizer."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advances by one update, or to a given one."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def state_dict(self) -> dict:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict) -> None:
        """Continues from `state`. The rates themselves are restored with the optimizer's groups."""
        self.last_batch_iteration = state["last_batch_iteration"]

    def _write(self) -> None:
        """Writes the rates. A tensor rate is updated in place, because a compiled or captured step reads it."""
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _per_group(self, value: float | Sequence[float], *, key: str) -> list[float]:
        groups = len(self.optimizer.param_groups)
        if isinstance(value, (list, tuple)) and len(value) != groups:
            raise ValueError(f"{key}={value}: the optimizer has {groups} parameter groups; give that many numbers")
        found = [float(item) for item in value] if isinstance(value, (list, tuple)) else [float(value)] * groups
        if not all(0 <= item < math.inf for item in found):
            raise ValueError(f"{key}={value}: must be 0 or more, and finite")
        return found


class WarmupLR(_Schedule):
    """From `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps` updates, then constant.

    `warmup_max_lr` defaults to the optimizer's rates.
    """

    _name, _options = "constant", {}

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        self.warmup_num_steps, self.warmup_type = _warmup(warmup_num_steps, kind=warmup_type)
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = self._per_group(warmup_min_lr, key="warmup_min_lr")
        self.max_lrs = rates if warmup_max_lr is None else self._per_group(warmup_max_lr, key="warmup_max_lr")
        _check_order(self.min_lrs, below=self.max_lrs, key="warmup_min_lr", other="warmup_max_lr")
        self._policy = SchedulePolicy(
            name=self._name,
            warmup_steps=self.warmup_num_steps,
            warmup_shape=warmup_type,
            warmup_start=0.0,
            **self._options,
        )
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return self.min_lrs
        reached = lr_multiplier(self._policy, step=self.last_batch_iteration, steps=_NEVER)
        return _between(self.min_lrs, self.max_lrs, reached=reached)


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then linear decay to `warmup_min_lr` at `total_num_steps`."""

    _name = "linear"

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        self._options = {"total_steps": total_num_steps}
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)


class WarmupCosineLR(_Schedule):
    """Multiples of the optimizer's rates: from `warmup_min_ratio` to 1, then half a cosine down to `cos_min_ratio`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps, self.warmup_min_ratio, self.cos_min_ratio = (
            total_num_steps,
            warmup_min_ratio,
            cos_min_ratio,
        )
        self.warmup_num_steps, self.warmup_type = _warmup(warmup_num_steps, kind=warmup_type)
        self.org_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._policy = SchedulePolicy(
            name="cosine",
            warmup_steps=self.warmup_num_steps,
            warmup_shape=warmup_type,
            warmup_start=warmup_min_ratio,
            final=cos_min_ratio,
            total_steps=total_num_steps,
        )
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    def get_lr_ratio(self) -> float:
        """Returns the current factor on the optimizer's rates; 0 before the first step."""
        if self.last_batch_iteration < 0:
            return 0.0
        return lr_multiplier(self._policy, step=self.last_batch_iteration, steps=_NEVER)

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]


class OneCycle(_Schedule):
    """Up from `cycle_min_lr` to `cycle_max_lr` and back, with beta1 ("momentum", with beta2 0.99) in the opposite direction; then decay.

    cycle_first_step_size, decay_step_size: steps. cycle_second_step_size: steps, defaults to the first; with 0 the cycle ends at
    `cycle_min_lr`, where the peak would be. Raises ValueError for a negative decay.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        self.min_lrs = self._per_group(cycle_min_lr, key="cycle_min_lr")
        self.max_lrs = self._per_group(cycle_max_lr, key="cycle_max_lr")
        _check_order(self.min_lrs, below=self.max_lrs, key="cycle_min_lr", other="cycle_max_lr")
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self._total = cycle_first_step_size + second
        self._climb = SchedulePolicy(
            name="one_cycle",
            start=0.0,
            rise_steps=cycle_first_step_size,
            fall_steps=second,
            rise_stairs=cycle_first_stair_count,
            fall_stairs=cycle_second_stair_count,
        )
        for key, value in (("decay_lr_rate", decay_lr_rate), ("decay_step_size", decay_step_size)):
            if value < 0:
                raise ValueError(f"{key}={value}: must be 0 or more")
        self._lr_decay = decay_lr_rate / decay_step_size if decay_step_size else 0.0
        self.cycle_momentum = cycle_momentum and all("betas" in group for group in optimizer.param_groups)
        self._min_moms = self._per_group(cycle_min_mom, key="cycle_min_mom")
        self._max_moms = self._per_group(cycle_max_mom, key="cycle_max_mom")
        self._mom_decay = decay_mom_rate / decay_step_size if decay_step_size else 0.0
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < self._total:
            return _between(self.min_lrs, self.max_lrs, reached=self._climbed())
        divisor = 1 + self._lr_decay * (self.last_batch_iteration - self._total + 1)
        return [low / divisor for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Returns the betas of every group, or None if they do not change. Before the first step they are the highest."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self._total:
            climbed = self._climbed()
            bounds = zip(self._min_moms, self._max_moms, strict=True)
            return [(high - (high - low) * climbed, 0.99) for low, high in bounds]
        factor = 1 + self._mom_decay * (self.last_batch_iteration - self._total + 1)
        return [(high * factor, 0.99) for high in self._max_moms]

    def _climbed(self) -> float:
        return lr_multiplier(self._climb, step=self.last_batch_iteration + 1, steps=_NEVER)

    def _write(self) -> None:
        super()._write()
        moms = self.get_mom() or ()
        if moms and self.last_batch_iteration < 0:  # as under DeepSpeed, the first step runs with the lowest
            moms = [(low, 0.99) for low in self._min_moms]
        for group, betas in zip(self.optimizer.param_groups, moms, strict=False):
            group["betas"] = betas


class LRRangeTest(_Schedule):
    """`lr_range_test_min_lr` (1 + rate * step / lr_range_test_step_size), with the size in steps: grows until training diverges."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        self.min_lr = self._per_group(lr_range_test_min_lr, key="lr_range_test_min_lr")
        self._policy = SchedulePolicy(
            name="range_test",
            step_size=lr_range_test_step_size,
            step_rate=lr_range_test_step_rate,
            staircase=lr_range_test_staircase,
        )
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    def get_lr(self) -> list[float]:
        factor = lr_multiplier(self._policy, step=self.last_batch_iteration + 1, steps=_NEVER)
        return [low * factor for low in self.min_lr]


SCHEDULES = {cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}
VALID_LR_SCHEDULES = list(SCHEDULES)


def _between(lows: Sequence[float], highs: Sequence[float], *, reached: float) -> list[float]:
    """Interpolates. reached: 0 is the low bound, 1 the high one."""
    return [low + (high - low) * reached for low, high in zip(lows, highs, strict=True)]


def _check_order(lows: Sequence[float], *, below: Sequence[float], key: str, other: str) -> None:
    for low, high in zip(lows, below, strict=True):
        if low > high:
            raise ValueError(f"{key}={low:g}: must lie from 0 to {other}={high:g}")


def _warmup(steps: int, *, kind: str) -> tuple[int, str]:
    """Returns the steps and the kind. 0 and 1 become 2, as in DeepSpeed: the Hugging Face Trainer fills in 0."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        raise ValueError(f"warmup_num_steps={steps!r}: must be a whole number, such as 1000")
    if kind not in ("log", "linear"):
        raise ValueError(f"warmup_type={kind!r}: must be log or linear")
    return max(2, steps), kind
