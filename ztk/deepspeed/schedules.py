"""DeepSpeed's five learning rate schedules: host objects that write `param_groups`, with its names, arguments and formulas.

The formulas are those of `ztk.optim.schedule`. A warm-up schedule makes its first update before its first step, at `warmup_min_lr`
(WarmupCosineLR: 0); the engine calls `step()` after every update that was not skipped.
"""

from collections.abc import Sequence

from torch.optim import Optimizer

from ztk.optim import SchedulePolicy, lr_multiplier

_NEVER = 2**62  # the length of a run that a schedule without an end does not ask for


class _Schedule:
    """Counts updates in `last_batch_iteration` (-1: none yet) and writes the rates of every group."""

    def __init__(self, optimizer: Optimizer, *, last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._write()

    def get_lr(self) -> list[float]:
        """The rate of every group now."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The rates as they stand in the optimizer."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """One update further, or to a given one."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def state_dict(self) -> dict:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict) -> None:
        """Continues where `state` was taken; the rates themselves come with the optimizer's groups."""
        self.last_batch_iteration = state["last_batch_iteration"]

    def _write(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate

    def _per_group(self, value: float | Sequence[float], *, key: str) -> list[float]:
        groups = len(self.optimizer.param_groups)
        if isinstance(value, (list, tuple)):
            if len(value) != groups:
                raise ValueError(f"{key}={value}: the optimizer has {groups} parameter groups; give that many numbers")
            return [float(item) for item in value]
        return [float(value)] * groups


class WarmupLR(_Schedule):
    """From `warmup_min_lr` to `warmup_max_lr` (None: the optimizer's rates) in `warmup_num_steps` updates, then constant."""

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
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = self._per_group(warmup_min_lr, key="warmup_min_lr")
        self.max_lrs = rates if warmup_max_lr is None else self._per_group(warmup_max_lr, key="warmup_max_lr")
        self._policies = [
            SchedulePolicy(
                name=self._name,
                warmup_steps=max(2, warmup_num_steps),
                warmup_shape=warmup_type,
                warmup_start=_ratio(low, of=high, key="warmup_min_lr", other="warmup_max_lr"),
                **(self._options if self._name == "constant" else {**self._options, "final": low / high}),
            )
            for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
        ]
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return self.min_lrs
        return [
            high * lr_multiplier(policy, step=self.last_batch_iteration, steps=_NEVER)
            for high, policy in zip(self.max_lrs, self._policies, strict=True)
        ]


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then a straight line back to `warmup_min_lr` at `total_num_steps`."""

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
    """Ratios of the optimizer's rates: from `warmup_min_ratio` to 1, then half a cosine down to `cos_min_ratio`."""

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
        self.total_num_steps = total_num_steps
        self.org_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._policy = SchedulePolicy(
            name="cosine",
            warmup_steps=max(2, warmup_num_steps),
            warmup_shape=warmup_type,
            warmup_start=warmup_min_ratio,
            final=cos_min_ratio,
            total_steps=total_num_steps,
        )
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return [0.0] * len(self.org_lrs)
        ratio = lr_multiplier(self._policy, step=self.last_batch_iteration, steps=_NEVER)
        return [rate * ratio for rate in self.org_lrs]


class OneCycle(_Schedule):
    """Up from `cycle_min_lr` to `cycle_max_lr` and back; beta1 (as "momentum", with beta2 0.99) the other way round; then decay."""

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
        self.max_lrs = self._per_group(cycle_max_lr, key="cycle_max_lr")
        min_lrs = self._per_group(cycle_min_lr, key="cycle_min_lr")
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self._total = cycle_first_step_size + second
        shape = {
            "rise_steps": cycle_first_step_size,
            "fall_steps": second,
            "rise_stairs": cycle_first_stair_count,
            "fall_stairs": cycle_second_stair_count,
        }
        decays = bool(decay_lr_rate and decay_step_size)
        decay = {"decay_rate": decay_lr_rate, "decay_interval": decay_step_size} if decays else {}
        self._policies = [
            SchedulePolicy(
                name="one_cycle",
                start=_ratio(low, of=high, key="cycle_min_lr", other="cycle_max_lr"),
                **shape,
                **decay,
            )
            for low, high in zip(min_lrs, self.max_lrs, strict=True)
        ]
        self._climb = SchedulePolicy(name="one_cycle", start=0.0, **shape)
        self.cycle_momentum = cycle_momentum and all("betas" in group for group in optimizer.param_groups)
        self._min_moms = self._per_group(cycle_min_mom, key="cycle_min_mom")
        self._max_moms = self._per_group(cycle_max_mom, key="cycle_max_mom")
        self._mom_decay = decay_mom_rate / decay_step_size if decay_step_size else 0.0
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    def get_lr(self) -> list[float]:
        return [
            high * lr_multiplier(policy, step=self.last_batch_iteration + 1, steps=_NEVER)
            for high, policy in zip(self.max_lrs, self._policies, strict=True)
        ]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of every group, or None if they are left alone."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < 0:
            return [(low, 0.99) for low in self._min_moms]
        if self.last_batch_iteration < self._total:
            climbed = lr_multiplier(self._climb, step=self.last_batch_iteration + 1, steps=_NEVER)
            bounds = zip(self._min_moms, self._max_moms, strict=True)
            return [(high - (high - low) * climbed, 0.99) for low, high in bounds]
        factor = 1 + self._mom_decay * (self.last_batch_iteration - self._total + 1)
        return [(high * factor, 0.99) for high in self._max_moms]

    def _write(self) -> None:
        super()._write()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = betas


class LRRangeTest(_Schedule):
    """`lr_range_test_min_lr` (1 + rate * step / size): grows until training breaks."""

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


def _ratio(low: float, *, of: float, key: str, other: str) -> float:
    if not 0 <= low <= of or of == 0:
        raise ValueError(f"{key}={low:g}: must lie from 0 to {other}={of:g}, which must be above 0")
    return low / of
