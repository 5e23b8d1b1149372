"""Ends a run before `train.steps`: a time limit and a held-out loss, with the same result on all ranks."""

import time

import torch
from torch import Tensor

from ztk.core.policies.train import TrainConfig
from ztk.train.engine import Engine
from ztk.train.loop import Loop


class Limits:
    """`train.max_seconds` and `train.until_loss`. Methods are collective calls with the same result on all ranks.

    The time starts now and is measured by rank 0's clock.
    """

    ends_alike = True

    def __init__(self, train: TrainConfig, *, engine: Engine) -> None:
        self._train, self._engine, self._started = train, engine, time.monotonic()

    def after_step(self, loop: Loop, *, loss: Tensor) -> None:
        """Ends the loop after `train.max_seconds`."""
        if self.is_over():
            loop.ended_by = self.reason(over=True, reached=False)

    def after_evaluation(self, loop: Loop, *, loss: float) -> None:
        """Ends the loop at `train.until_loss`."""
        if self.is_reached(loss):
            loop.ended_by = self.reason(over=False, reached=True)

    def is_over(self) -> bool:
        """Returns whether `train.max_seconds` have passed. Waits for the step's end on a GPU. Without the key there is no
        communication.
        """
        limit = self._train.max_seconds
        if limit is None:
            return False
        elapsed = torch.tensor(
            [time.monotonic() - self._started], dtype=torch.float64, device=self._engine.process.device
        )
        return self._engine.comm.gather_scalars(elapsed, label="time limit")[0, 0].item() >= limit

    def is_reached(self, loss: float | None) -> bool:
        """Returns whether a held-out loss, the same on every rank, is at most `train.until_loss`. loss: None without an evaluation."""
        limit = self._train.until_loss
        return limit is not None and loss is not None and loss <= limit

    def reason(self, *, over: bool, reached: bool) -> str:
        """Returns the reason for the end of the run, as a key and its value."""
        key = "until_loss" if reached else "max_seconds" if over else "steps"
        return f"train.{key}={getattr(self._train, key):g}" if key != "steps" else f"train.steps={self._train.steps}"
