"""Builds one row of `metrics.jsonl` per logged step.

Every rank adds its mean loss of every step as a device scalar, and nothing is read from the device until a row is due. One gather then
exchanges the losses since the last row and the counters, so a GPU run waits for its device once per row.
"""

import hashlib
import statistics
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ztk.core.policies.machine import place_of
from ztk.core.policies.utilization import Work
from ztk.report.gauges import Gather, Gauges
from ztk.train.engine import StepMetrics


class LossDigest:
    """A hash chain over the bits of every step's float32 loss.

    Two runs have equal digests if and only if all their losses are bitwise equal. `value` is the complete state: a resumed run that
    starts from it ends with the digest of an uninterrupted run.
    """

    def __init__(self, value: str = "") -> None:
        self.value = value

    def update(self, loss: float) -> None:
        """Adds a loss. loss: a float32 value, so packing it is exact."""
        bits = struct.pack("<f", loss)
        self.value = hashlib.sha256(bytes.fromhex(self.value) + bits).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    """The counters at one moment."""

    flows: dict[str, float]
    time: float


class RowBuilder:
    """Collects steps and builds rows.

    A row contains `lr`, `grad_norm` and `loss_scale` of the last step, and:
    - `step`, counted from 1; `loss`, the mean over ranks and micro-batches of that step; `tokens` trained on and steps `skipped` so far;
    - means since the last row: `tokens_per_second` in total and per device, `step_seconds`, and `mfu` and `hfu` if `work` is known;
    - `slowest_rank` and `slowest_ratio` of several ranks since the last row; see `Slowest`.
    - `memory.*_bytes` booked now, and `comm.*_bytes` and `io.*_bytes` per step since the last row, of the rank with the most.
    """

    def __init__(
        self,
        *,
        gauges: Gauges,
        gather: Gather,
        first_step: int,
        first_tokens: int,
        digest: str,
        world_size: int = 1,
        work: Work | None = None,
        slowest_every: int = 0,
    ) -> None:
        self.world_size, self.work = world_size, work
        self._slowest = SlowestRank(every=slowest_every)
        self.slowest_line = ""  # of the last row, if one is due
        self.step = first_step
        self._first_step = first_step
        self.digest = LossDigest(digest)
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self.step_seconds: list[float] = []  # per row
        self.tokens = self._first_tokens = first_tokens
        self._gauges, self._gather = gauges, gather
        self._losses: list[Tensor] = []  # of the steps since the last row
        self._new_tokens = 0
        self.flows: dict[str, float] = dict.fromkeys(
            gauges.flows(), 0
        )  # sums of `Gauges.flows` over the steps of this run
        self._mark = _Mark(flows={}, time=0.0)  # start of the current row; `aside` moves it forward

    @property
    def num_steps(self) -> int:
        """Number of steps of this run, without those before it was resumed."""
        return self.step - self._first_step

    @property
    def num_pending(self) -> int:
        """Number of steps since the last row."""
        return len(self._losses)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in this run's rows, without those before it was resumed."""
        return self.tokens - self._first_tokens

    def start(self) -> None:
        """Starts the time of the first step."""
        self._mark = self._now()

    def add(self, *, loss: Tensor, tokens: int) -> None:
        """Adds one step. loss: this rank's, a scalar."""
        self.step += 1
        self._losses.append(loss.detach().reshape(1).double())
        self._new_tokens += tokens

    def build(self, metrics: StepMetrics, *, num_logged: int = 0) -> tuple[dict[str, Any], bool]:
        """Returns the row of the last step, the same on every rank, and whether any rank has `num_logged` above 0."""
        steps = len(self._losses)
        now = self._now()
        flows = {key: total - self._mark.flows[key] for key, total in now.flows.items()}
        counters = self._gauges.memory_bytes() | {
            key: total // steps for key, total in flows.items() if key.endswith("_bytes")
        }
        losses, (*largest, most_logged), seconds_of_ranks = self._gather_all(
            [*counters.values(), num_logged], own=own_seconds(flows)
        )
        slowest, self.slowest_line = self._slowest.add(seconds_of_ranks)
        for loss in losses:
            self.digest.update(loss)
        self.first_loss = losses[0] if self.first_loss is None else self.first_loss
        self.last_loss = losses[-1]
        self.tokens += self._new_tokens
        seconds = time.perf_counter() - self._mark.time
        self.step_seconds.append(seconds / steps)
        row = {
            "step": self.step,
            "loss": losses[-1],
            "lr": metrics.lr,
            "grad_norm": metrics.grad_norm,
            "loss_scale": metrics.loss_scale,
            "skipped": metrics.skipped_total,
            "tokens": self.tokens,
            "tokens_per_second": self._new_tokens / seconds,
            "tokens_per_second_per_gpu": self._new_tokens / seconds / self.world_size,
            "step_seconds": seconds / steps,
            **(self.work.shares(seconds / steps) if self.work else {}),
            **slowest,
            **{key: int(value) for key, value in zip(counters, largest, strict=True)},
        }
        self.flows = {key: total + flows[key] for key, total in self.flows.items()}
        self._losses, self._new_tokens = [], 0
        self._mark = _Mark(flows=now.flows, time=self._mark.time + seconds)
        return row, most_logged > 0

    def summary(self) -> dict[str, Any]:
        """Returns the metrics of the steps for `summary.json`.

        `tokens_per_second`, `mfu` and `hfu` are of the median step, so that pauses and the first step's warm-up do not count.
        """
        median = statistics.median(self.step_seconds) if self.step_seconds else None
        speed = self.num_tokens / max(1, self.num_steps) / median if median else None
        work = self.work.shares(median) | self.work.as_dict() if self.work and median else {}
        return {
            "first_loss": self.first_loss,
            "final_loss": self.last_loss,
            "tokens": self.tokens,
            "tokens_per_second": speed,
            "tokens_per_second_per_gpu": None if speed is None else speed / self.world_size,
            "step_seconds_median": median,
            **work,
            "loss_digest": self.digest.value,
        }

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Excludes the time inside, and the bytes moved there, from the steps."""
        if self._gauges.device.type == "cuda":
            torch.cuda.synchronize(self._gauges.device)  # finishes the current step's work, which is not excluded
        before = self._now()
        try:
            yield
        finally:
            after, mark = self._now(), self._mark
            flows = {key: mark.flows[key] + after.flows[key] - before.flows[key] for key in mark.flows}
            self._mark = _Mark(flows=flows, time=mark.time + after.time - before.time)

    def _now(self) -> "_Mark":
        return _Mark(flows=self._gauges.flows(), time=time.perf_counter())

    def _gather_all(self, counters: list[int], *, own: list[float]) -> tuple[list[float], list[float], Tensor]:
        """Returns the mean losses over ranks as float32 values, the maximum over ranks of each counter, and `own` of all ranks, [ranks, n]."""
        losses = torch.cat(self._losses)
        numbers = torch.tensor([*counters, *own], dtype=torch.float64, device=losses.device)
        everyone = self._gather(torch.cat([losses, numbers])).cpu()  # the only wait for the device
        losses_of_ranks, numbers_of_ranks = everyone[:, : len(losses)], everyone[:, len(losses) :]
        summed = torch.zeros(len(losses), dtype=torch.float64)
        for rank_losses in losses_of_ranks:  # in rank order, so that the sum is deterministic
            summed += rank_losses
        largest = numbers_of_ranks[:, : len(counters)].amax(0).tolist()
        return (summed / len(everyone)).float().tolist(), largest, numbers_of_ranks[:, len(counters) :]


# The rank that the others wait for, found by its own seconds: the time in phases in which a rank waits for no other.

OWN_PHASES = ("forward", "backward", "optimizer", "io")  # not "communication" and "bubble"


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowest:
    """The rank with the most own seconds. ratio: to the median of all ranks. phase: the one that is furthest above its median."""

    rank: int
    ratio: float
    phase: str

    @staticmethod
    def of(seconds: Tensor) -> "Slowest | None":
        """seconds: [ranks, phases of `OWN_PHASES`] in host memory. None for a single rank, and if the median is zero."""
        own = seconds.sum(1)
        median = float(own.quantile(0.5))
        if len(own) < 2 or median <= 0:
            return None
        rank = int(own.argmax())
        excess = seconds[rank] - seconds.quantile(0.5, dim=0)
        return Slowest(rank=rank, ratio=float(own[rank]) / median, phase=OWN_PHASES[int(excess.argmax())])


class SlowestRank:
    """Adds up the seconds of the rows since the last line. every: rows between lines; 0 for none."""

    def __init__(self, *, every: int) -> None:
        self._every, self._rows = every, 0
        self._seconds: Tensor | None = None

    def add(self, seconds: Tensor) -> tuple[dict[str, float], str]:
        """Returns the row's columns, and the line if one is due, else "". seconds: the argument of `Slowest.of` since the last row."""
        found = Slowest.of(seconds)
        columns = {} if found is None else {"slowest_rank": found.rank, "slowest_ratio": found.ratio}
        self._seconds = seconds if self._seconds is None else self._seconds + seconds
        self._rows += 1
        if not self._every or self._rows < self._every:
            return columns, ""
        found, rows = Slowest.of(self._seconds), self._rows
        self._seconds, self._rows = None, 0
        if found is None:
            return columns, ""
        return columns, (
            f"the slowest rank of the last {rows} rows is {place_of(found.rank)}: {found.ratio:.2f} times the median's own seconds, most in "
            f"{found.phase}"
        )


def own_seconds(flows: dict[str, float]) -> list[float]:
    """Seconds of `OWN_PHASES` in a difference of `Gauges.flows`."""
    return [flows[f"seconds.{phase}"] for phase in OWN_PHASES]
