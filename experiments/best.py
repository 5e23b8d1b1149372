"""Tracks the best value of a metric, for keeping checkpoints and for stopping early."""

import math
from collections.abc import Mapping
from typing import Any

from ztk import checkpoint
from ztk.config import Config
from ztk.train.loop import Loop


class Best:
    """`checkpoint.metric`, `checkpoint.higher_is_better` and `train.patience`, with the same state on all ranks."""

    ends_alike = True

    def __init__(self, config: Config) -> None:
        self._name, self._patience = config.checkpoint.metric, config.train.patience
        self._sign = -1.0 if config.checkpoint.higher_is_better else 1.0
        self._best, self._misses = math.inf, 0  # smaller is better
        self._is_known = False  # whether a row had the metric

    @classmethod
    def of(cls, config: Config, *, loaded: checkpoint.LoadReport | None) -> "Best":
        """Continues from the checkpoint of a resumed run."""
        found, state = cls(config), (loaded.data_state or {}).get("best") if loaded is not None else None
        if state is not None:
            found.load_state_dict(state)
        return found

    def metric(self, values: Mapping[str, Any]) -> float | None:
        """Returns the value that ranks a checkpoint; smaller is better. values: the row of the step.

        Returns None without `checkpoint.metric`, if the value is not finite, or if it is missing after an earlier row had it: reward
        functions may omit it.

        Raises:
            ValueError: no row had such a value yet.
        """
        if self._name is None or (self._is_known and self._name not in values):
            return None
        if self._name not in values:
            numbers = [name for name, value in values.items() if isinstance(value, int | float)]
            raise ValueError(
                f"checkpoint.metric={self._name}: rows have no such value; use one of {', '.join(sorted(numbers)) or 'none'}"
            )
        self._is_known = True
        value = self._sign * float(values[self._name])
        return value if math.isfinite(value) else None

    def reason_to_end(self, values: Mapping[str, Any]) -> str | None:
        """Returns the reason to end the run after an evaluation, or None. values: the row of the step. Raises ValueError as `metric`."""
        if self._patience is None or self._name is None:
            return None
        found = self.metric(values)
        is_better = found is not None and found < self._best
        self._misses = 0 if is_better else self._misses + 1
        self._best = found if is_better else self._best
        if self._misses < self._patience:
            return None
        if math.isinf(self._best):
            return f"train.patience={self._patience}: {self._name} was not finite in {self._misses} evaluations"
        return f"train.patience={self._patience}: {self._name} was best at {self._sign * self._best:.6g}, {self._misses} evaluations ago"

    def after_evaluation(self, loop: Loop, *, loss: float) -> None:
        """Ends the loop after `train.patience` regular evaluations without a better value."""
        if loop.is_regular:
            loop.ended_by = self.reason_to_end(loop.measured)

    def state_dict(self) -> dict[str, Any]:
        """Returns a JSON value, the same on all ranks."""
        return {
            "best": None if math.isinf(self._best) else self._best,
            "misses": self._misses,
            "is_known": self._is_known,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`."""
        self._best = math.inf if state["best"] is None else state["best"]
        self._misses = state["misses"]
        self._is_known = state.get("is_known", False)  # older checkpoints have none
