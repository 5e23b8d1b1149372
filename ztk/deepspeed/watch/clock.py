"""Times of forward, backward and step, and samples per second."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from ztk.deepspeed.config.watching import ThroughputPolicy

_WARM_UP = 2  # steps before samples per second are counted


class WallClock:
    """Milliseconds of the phases, synchronized with a GPU. `micro` is for the last micro-batch, `step` sums over the step.

    Phases have DeepSpeed's names: fwd, bwd (with its parts bwd_inner and bwd_allreduce), step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.micro: dict[str, float] = {}
        self.step: dict[str, float] = {}
        self._ended = False

    @contextmanager
    def phase(self, name: str, *, phases: Mapping[str, float]) -> Iterator[None]:
        """Times a phase. phases: seconds on the engine's own clock, from which the waiting time for communication is taken."""
        if self._ended:
            self.step, self._ended = {}, False
        waited = phases.get("communication", 0.0)
        start = self._now()
        yield
        spent = {name: 1000 * (self._now() - start)}
        if name == "bwd":
            allreduce = 1000 * (phases.get("communication", 0.0) - waited)
            spent |= {"bwd_inner": spent["bwd"] - allreduce, "bwd_allreduce": allreduce}
        self.micro |= spent
        for part, milliseconds in spent.items():
            self.step[part] = self.step.get(part, 0.0) + milliseconds

    def end_step(self) -> None:
        """Marks the end of a step."""
        self._ended = True

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class Throughput:
    """Samples per second, from the first forward of a step to its end. The first two steps do not count.

    Available as `engine.tput_timer`. global_step_count: number of timed steps. epoch_count: increased by the script.
    """

    def __init__(self, policy: ThroughputPolicy, *, device: torch.device) -> None:
        self._policy, self._device = policy, device
        self._started: float | None = None
        self.global_step_count = self._samples = 0
        self._seconds = self._last = 0.0
        self.epoch_count = 0

    def update_epoch_count(self) -> None:
        """Increases the epoch in the printed line. Called by scripts."""
        self.epoch_count += 1

    def avg_samples_per_sec(self) -> float:
        """Returns the mean over the counted steps; minus infinity before the first."""
        return self._samples / self._seconds if self._samples else float("-inf")

    def start(self) -> None:
        """Called at the start of a micro-batch; only the first of a step counts."""
        if self._policy.enabled and self._started is None:
            self._started = self._now()

    def stop(self, *, samples: int) -> None:
        """Called at the end of a step over `samples`."""
        if self._started is None:
            return
        seconds, self._started = self._now() - self._started, None
        self.global_step_count += 1
        if self.global_step_count > _WARM_UP:
            self._seconds += seconds
            self._samples += samples
            self._last = samples / seconds

    def text(self, *, micro_steps: int, steps: int) -> str | None:
        """Returns DeepSpeed's line, or None before a step counts."""
        if not self._samples:
            return None
        average = self.avg_samples_per_sec()
        words = f"epoch={self.epoch_count}/micro_step={micro_steps}/global_step={steps}, RunningAvgSamplesPerSec={average:.6g}"
        words += f", CurrSamplesPerSec={self._last:.6g}"
        if self._device.type == "cuda":
            now, most = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
            words += f", MemAllocated={now / 2**30:.2f}GB, MaxMemAllocated={most / 2**30:.2f}GB"
        return words

    def _now(self) -> float:
        if self._policy.synchronized and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
