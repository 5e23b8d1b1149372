"""Called by the engine around forward, backward and step; prints and writes the measurements. Losses have any floating-point dtype."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch

from ztk.core.runtime import Tier
from ztk.deepspeed.config import Settings
from ztk.deepspeed.tools.helpers import see_memory_usage
from ztk.deepspeed.tools.log import logger
from ztk.deepspeed.tools.timers import ThroughputTimer, now
from ztk.deepspeed.watch.monitors import Event, MonitorMaster
from ztk.train.engine import Engine

_USUAL = 10  # steps between reports of a breakdown without `steps_per_print`
_PHASES = {"forward": "fwd", "backward": "bwd", "backward_inner": "bwd_inner", "backward_allreduce": "bwd_allreduce"}


class WallClock:
    """Milliseconds of the phases, synchronized with a GPU. `micro` is for the last micro-batch, `step` sums over the step.

    Phases have DeepSpeed's names: fwd, bwd (with its parts bwd_inner and bwd_allreduce), step.
    """

    def __init__(self) -> None:
        self.micro: dict[str, float] = {}
        self.step: dict[str, float] = {}
        self._ended = False

    @contextmanager
    def phase(self, name: str, *, phases: Mapping[str, float]) -> Iterator[None]:
        """Times a phase. phases: seconds on the engine's own clock, from which the waiting time for communication is taken."""
        if self._ended:
            self.step, self._ended = {}, False
        waited = phases.get("communication", 0.0)
        start = now()
        yield
        spent = {name: 1000 * (now() - start)}
        if name == "bwd":
            allreduce = 1000 * (phases.get("communication", 0.0) - waited)
            spent |= {"bwd_inner": spent["bwd"] - allreduce, "bwd_allreduce": allreduce}
        self.micro |= spent
        for part, milliseconds in spent.items():
            self.step[part] = self.step.get(part, 0.0) + milliseconds

    def end_step(self) -> None:
        """Marks the end of a step."""
        self._ended = True


class Watcher:
    """Belongs to one DeepSpeedEngine. Rank 0 prints and writes; every rank measures."""

    def __init__(self, facade) -> None:
        """facade: the DeepSpeedEngine. Its inner engine and its batch sizes may change later."""
        self._facade = facade
        settings, process = facade.settings, facade.engine.process
        watching = settings.watching
        self.monitor = MonitorMaster(watching.monitors)
        self.clock = WallClock() if settings.wall_clock_breakdown else None
        self._prints_times = settings.wall_clock_breakdown and process.rank == 0
        wanted = settings.wall_clock_breakdown or settings.memory_breakdown
        self._every = settings.steps_per_print or (_USUAL if wanted else None)
        self._is_first = process.rank == 0
        self._throughput = ThroughputTimer(watching.throughput, settings.batch.train)
        self._is_read = False  # by a script; enables counting
        self._seconds: dict[str, float] = {}
        self._losses: list[torch.Tensor] = []
        if settings.dump_state and self._is_first:
            self._dump()

    @property
    def _settings(self) -> Settings:
        return self._facade.settings

    @property
    def _engine(self) -> Engine:
        return self._facade.engine

    @property
    def throughput(self) -> ThroughputTimer:
        """The throughput timer for scripts. Its first use enables counting even if nothing is printed."""
        self._is_read = True
        return self._throughput

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Wraps the module's forward."""
        self._start_throughput()
        with self._timed("fwd"):
            yield
        self._see("after forward")

    @contextmanager
    def backward(self, loss: torch.Tensor) -> Iterator[None]:
        """Wraps the backward of a micro-batch's `loss`, a scalar."""
        self.note_loss(loss)
        with self._timed("bwd"):
            yield
        self._see("after backward")

    def note_loss(self, loss: torch.Tensor) -> None:
        """Adds a loss, a scalar, to the mean of the step."""
        if self.monitor.enabled and self._is_first:
            self._losses.append(loss.detach())

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Wraps a pipeline's full step, whose time counts as `step`."""
        self._start_throughput()
        with self.step():
            yield

    @contextmanager
    def step(self) -> Iterator[None]:
        """Wraps `step()` of a micro-batch and prints its times."""
        with self._timed("step"):
            yield
        if self._prints_times:
            assert self.clock is not None
            _log_times({f"{name}_microstep": spent for name, spent in self.clock.micro.items()})

    def after_step(self) -> None:
        """Called after the optimizer's step."""
        step = self._facade.global_steps
        self._throughput.batch_size = self._settings.batch.train
        self._throughput.stop(global_step=True)
        self._see("after step")
        if self._is_first:
            if self.monitor.enabled:
                self.monitor.write_events(self._events())
            if self._prints_times:
                assert self.clock is not None
                _log_times(self.clock.step)
            if self._every and step % self._every == 0:
                self._report(step)
        if self.clock is not None:
            self.clock.end_step()

    def close(self) -> None:
        self.monitor.close()

    def _start_throughput(self) -> None:
        """Starts the timer at the first forward of a step."""
        if (self._every or self._is_read) and not self._throughput.started:
            self._throughput.start()

    def _timed(self, name: str):
        return nullcontext() if self.clock is None else self.clock.phase(name, phases=self._engine.clock.seconds)

    def _events(self) -> list[Event]:
        facade = self._facade
        samples, losses = facade.global_samples, self._losses
        self._losses = []
        events: list[Event] = []
        if losses:
            events.append(("Train/Samples/train_loss", float(torch.stack(losses).float().mean()), samples))
        events.append(("Train/Samples/lr", facade.get_lr()[0], samples))
        if facade.fp16_enabled():
            events.append(("Train/Samples/loss_scale", facade.optimizer.cur_scale, samples))
        if self._settings.wall_clock_breakdown:
            assert self.clock is not None
            spent = self.clock.step
            events += [
                (f"Train/Samples/elapsed_time_ms_{word}", spent[name], samples)
                for word, name in (*_PHASES.items(), ("step", "step"))
                if name in spent  # a pipeline has only full steps
            ]
        return events

    def _report(self, step: int) -> None:
        facade = self._facade
        logger.info("step=%d, skipped=%d, lr=%s, mom=%s", step, facade.skipped_steps, facade.get_lr(), facade.get_mom())
        if self._throughput.total_elapsed_time:
            logger.info(self._throughput.line(micro_step=facade.micro_steps, step=step))
        if self._prints_times:
            before, self._seconds = self._seconds, dict(self._engine.clock.seconds)
            spent = {name: seconds - before.get(name, 0.0) for name, seconds in self._seconds.items()}
            words = ", ".join(f"{name} {1000 * seconds / self._every:.2f}" for name, seconds in spent.items())
            logger.info("milliseconds per step: %s", words)
        if self._settings.memory_breakdown:
            for tier in Tier:
                for category, nbytes in sorted(self._engine.memory.by_category(tier).items()):
                    logger.info("memory: %s, %s: %.1f MiB", tier.label, category, nbytes / 2**20)

    def _see(self, moment: str) -> None:
        """Records the memory at this point of the steps that report."""
        if self._settings.memory_breakdown and self._is_first:
            step = self._facade.global_steps + (moment != "after step")
            see_memory_usage(f"Engine {moment}", force=step % self._every == 0)

    def _dump(self) -> None:
        """Logs the final settings for `dump_state`."""
        logger.info("DeepSpeedEngine:")
        for field in dataclasses.fields(self._settings):
            value = getattr(self._settings, field.name)
            if field.name == "given" and "api_key" in value.get("comet", {}):
                value = {**value, "comet": {**value["comet"], "api_key": "..."}}
            logger.info("  %s %s %s", field.name, "." * (29 - len(field.name)), value)


def _log_times(milliseconds: dict[str, float]) -> None:
    words = "".join(f" | {name}: {spent:.2f}" for name, spent in milliseconds.items())
    logger.info("time (ms)%s", words)
