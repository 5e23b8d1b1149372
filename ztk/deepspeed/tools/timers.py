"""`deepspeed.utils.timer`: timers for custom loops. They synchronize with a GPU at both ends of a measurement."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ztk.core.runtime.system_memory import machine_memory
from ztk.deepspeed.tools.device import get_accelerator
from ztk.deepspeed.tools.log import log_dist, logger

GIB = 2**30


class Timer:
    """Accumulates the time between `start` and `stop`."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self._since = 0.0
        self._spans: list[float] = []  # seconds

    def start(self) -> None:
        """Starts the timer. Raises RuntimeError if it is running."""
        if self.started_:
            raise RuntimeError(f"timer {self.name_!r} runs already: call stop() before start()")
        self._since, self.started_ = now(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Stops the timer. Raises RuntimeError if it is not running.

        reset: forgets earlier spans. record: accepted and ignored; every span is kept.
        """
        del record
        if not self.started_:
            raise RuntimeError(f"timer {self.name_!r} does not run: call start() before stop()")
        span = now() - self._since
        self._spans = [span] if reset else [*self._spans, span]
        self.started_ = False

    def reset(self) -> None:
        self.started_ = False
        self._spans.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Returns milliseconds so far. A running timer continues, with `reset` from zero."""
        runs = self.started_
        if runs:
            self.stop()
        spent = 1000 * sum(self._spans)
        if reset:
            self.reset()
        if runs:
            self.start()
        return spent

    def mean(self) -> float:
        """Returns the mean milliseconds of a span, without the longest and the shortest tenth."""
        return 1000 * trim_mean(self._spans)


class SynchronizedWallClockTimer:
    """Timers by name: `timers("fwd").start()`, `timers("fwd").stop()`, `timers.log(["fwd"])`."""

    Timer = Timer

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, Timer(name))

    def get_timers(self) -> dict[str, Timer]:
        """Returns the timers by name."""
        return self.timers

    @staticmethod
    def memory_usage() -> str:
        """Returns the device's memory in GiB, current and peak, as the end of a line."""
        device = get_accelerator()
        values = {
            "mem_allocated": device.memory_allocated(),
            "max_mem_allocated": device.max_memory_allocated(),
            "cache_allocated": device.memory_cached(),
            "max_cache_allocated": device.max_memory_cached(),
        }
        return "".join(f" | {name}: {nbytes / GIB:.4f} GB" for name, nbytes in values.items())

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Logs milliseconds of the existing timers, divided by `normalizer`. ranks: defaults to rank 0."""
        times = self._divided(names, normalizer=normalizer, of=lambda timer: timer.elapsed(reset=reset))
        words = "time (ms)" + "".join(f" | {name}: {value:.2f}" for name, value in times.items())
        log_dist(words + (self.memory_usage() if memory_breakdown else ""), ranks=list(ranks or [0]))

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Returns mean milliseconds of a span (`Timer.mean`), divided by `normalizer`."""
        found = self._divided(names, normalizer=normalizer, of=Timer.mean)
        if reset:
            for name in found:
                self.timers[name].reset()
        return found

    def _divided(self, names: Iterable[str], *, normalizer: float, of: Callable[[Timer], float]) -> dict[str, float]:
        if not normalizer > 0:
            raise ValueError(f"normalizer={normalizer}: must be above 0")
        return {name: of(self.timers[name]) / normalizer for name in names if name in self.timers}


class ThroughputTimer:
    """Samples per second: `start` and `stop` around every micro-batch, `stop(global_step=True)` at the last one of a step.

    config: has `enabled` and `synchronized`, as `timers.throughput` of a configuration. synchronized: waits for the GPU at both ends.
    batch_size: samples per step. start_step: number of steps that do not count. steps_per_output: steps between printed lines, if given.
    monitor_memory: adds the machine's memory. epoch_count: increased by the script.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], object] | None = None,
    ) -> None:
        self.config = config
        self.batch_size = batch_size or 1
        self.start_step, self.steps_per_output = start_step, steps_per_output
        self.monitor_memory, self.logging = monitor_memory, logging_fn or logger.info
        self.started = False
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0
        self._since: float | None = None
        self._samples, self._latest = 0, 0.0  # of the counted steps, and per second of the last one

    def update_epoch_count(self) -> None:
        """Starts another epoch, with its first micro-batch."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        if not self.config.enabled:
            return
        self.started = True
        self._since = self._read() if self.global_step_count >= self.start_step else None

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Stops the timer. Does nothing without a `start`."""
        if not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        if self._since is not None:
            spent = self._read() - self._since
            self.total_elapsed_time += spent
            self.step_elapsed_time += spent
        if not global_step:
            return
        self.global_step_count += 1
        if self._since is not None:
            self._samples += self.batch_size
            self._latest = self.batch_size / self.step_elapsed_time
            every = self.steps_per_output
            if report_speed and every and self.global_step_count % every == 0:
                self._report()
        self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Returns the mean over the counted steps; minus infinity before the first."""
        return self._samples / self.total_elapsed_time if self._samples else float("-inf")

    def line(self, *, micro_step: int, step: int) -> str:
        """Returns the line to print after the micro-batch and the step with these numbers."""
        device = get_accelerator()
        return (
            f"epoch={self.epoch_count}/micro_step={micro_step}/global_step={step}, "
            f"RunningAvgSamplesPerSec={self.avg_samples_per_sec():.6g}, CurrSamplesPerSec={self._latest:.6g}, "
            f"MemAllocated={device.memory_allocated() / GIB:.2f}GB, MaxMemAllocated={device.max_memory_allocated() / GIB:.2f}GB"
        )

    def _report(self) -> None:
        line = self.line(micro_step=self.micro_step_count, step=self.global_step_count)
        self.logging(line)
        if self.monitor_memory:
            host = machine_memory()
            place = line.partition(",")[0]
            self.logging(f"{place}, vm %: {100 * (1 - host['MemAvailable'] / host['MemTotal']):.1f}")

    def _read(self) -> float:
        return now() if self.config.synchronized else time.perf_counter()


def trim_mean(data: Sequence[float], trim_percent: float = 0.1) -> float:
    """Returns the mean without the fraction `trim_percent` of the values at each end; 0 for no values.

    Raises ValueError for a fraction outside 0 to 0.5.
    """
    if not 0 <= trim_percent < 0.5:
        raise ValueError(f"trim_percent={trim_percent}: must lie from 0 to below 0.5")
    if not data:
        return 0.0
    cut = round(len(data) * trim_percent)
    kept = sorted(data)[cut : len(data) - cut]
    return sum(kept) / len(kept)


def now() -> float:
    """Returns seconds on the host's clock, after the GPU has finished its work so far."""
    get_accelerator().synchronize()
    return time.perf_counter()
