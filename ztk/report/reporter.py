"""Records a run while it proceeds. Every rank has a reporter; rank 0 writes and draws."""

import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from torch import Tensor, nn

from ztk.core.policies.profile import ProfilePolicy
from ztk.core.policies.utilization import Work
from ztk.core.runtime import Comm
from ztk.core.runtime.logged import Logged
from ztk.report.environment import describe_environment
from ztk.report.folder import RunFolder, write_failed_summary
from ztk.report.gauges import Gauges
from ztk.report.kernels import KernelLog, KernelPolicy
from ztk.report.profile import StepProfiler
from ztk.report.rows import RowBuilder
from ztk.report.status import INTERRUPTED, Status, read_summary
from ztk.report.tables import describe_end, print_tables
from ztk.report.tracker import Tracker, TrackerPolicy
from ztk.report.units import format_bytes, format_count
from ztk.train.engine import StepMetrics

_Item = TypeVar("_Item")


def rank_totals(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combines the ranks' reports: the largest peak per tier, bytes per tier and category at the end and at the peak, bytes moved in all
    steps.

    Seconds per phase are from the rank that was busy longest, so that they add up. Bytes at the end have the keys
    `memory.{tier}.{category}_bytes`, bytes at the peak `peak_memory.{tier}.{category}_bytes`. Both are from the rank with the highest
    peak of the tier, so that they add up too.
    """
    totals: dict[str, Any] = {}
    for report in reports:
        categories = {
            f"memory.{tier}.{category}_bytes".replace(" ", "_"): nbytes
            for tier, held in report["memory"].items()
            for category, nbytes in held.items()
        }
        for key, value in (report["peak"] | categories | report["flows"]).items():
            totals[key] = max(value, totals.get(key, value))
    seconds = [
        {key: value for key, value in report["flows"].items() if key.startswith("seconds.")} for report in reports
    ]
    return totals | max(seconds, key=lambda phases: sum(phases.values())) | _at_peak(reports)


def _at_peak(reports: Sequence[dict[str, Any]]) -> dict[str, int]:
    found = {}
    for tier in reports[0]["memory"]:
        highest = max(reports, key=lambda report: report["peak"][f"peak_memory.{tier}_bytes"])
        for category, nbytes in highest["at_peak"][tier].items():
            found[f"peak_memory.{tier}.{category}_bytes".replace(" ", "_")] = nbytes
    return found


class LiveProgress:
    """A progress bar and a line of metrics, redrawn in place on a terminal. Only one process may draw. device: see `describe_row`."""

    def __init__(self, *, console: Console, total_steps: int, start_step: int, device: str = "GPU") -> None:
        self._console, self._device = console, device
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task("train", total=total_steps, completed=start_step)
        self._live = Live(self._bar, console=console, refresh_per_second=4)
        self._live.start()

    def row(self, row: Mapping[str, Any]) -> None:
        self._bar.update(self._task, completed=row["step"])
        self._live.update(
            Group(self._bar, Text(describe_row(row, device=self._device), overflow="ellipsis", no_wrap=True))
        )

    def close(self) -> None:
        self._live.stop()


class PlainProgress:
    """Prints one line every `seconds`, and for the first and the last step, for logs and pipes. device: see `describe_row`."""

    def __init__(self, *, console: Console, total_steps: int, seconds: float = 10.0, device: str = "GPU") -> None:
        self._console, self._device = console, device
        self._total_steps = total_steps
        self._seconds = seconds
        self._last = float("-inf")

    def row(self, row: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if now - self._last < self._seconds and row["step"] != self._total_steps:
            return
        self._last = now
        text = f"step {row['step']}/{self._total_steps}  {describe_row(row, device=self._device)}"
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        pass


def describe_row(row: Mapping[str, Any], *, device: str = "GPU") -> str:
    """Describes a row: loss, learning rate, speed with MFU and HFU if known, memory of the tiers in use, validation loss and loss scale
    if any.

    Rows of a policy start with reward, KL divergence, entropy and length. device: unit in "tokens/s (N/GPU)", "GPU" or "rank".
    """
    parts = [f"{name} {row[name]:.3f}" for name in ("reward", "kl", "entropy", "length") if row.get(name) is not None]
    parts += [
        f"loss {row['loss']:.4f}",
        f"lr {row['lr']:.2e}",
        _speed(row, device=device),
        f"{1e3 * row['step_seconds']:.0f} ms/step",
    ]
    parts += [f"{name.upper()} {row[name]:.1%}" for name in ("mfu", "hfu") if row.get(name) is not None]
    for tier in ("device", "host", "nvme"):
        if nbytes := row[f"memory.{tier}_bytes"]:
            parts.append(f"{tier} {format_bytes(nbytes)}")
    if row["loss_scale"] != 1:
        parts.append(f"scale {row['loss_scale']:g}")
    if (validation := row.get("validation_loss")) is not None:
        parts.append(f"validation {validation:.4f}")
    return "  ".join(parts)


def _speed(row: Mapping[str, Any], *, device: str) -> str:
    """Formats tokens per second over all devices, and per device if there are several."""
    total, own = row["tokens_per_second"], row.get("tokens_per_second_per_gpu")
    of_one = f" ({format_count(own)}/{device})" if own is not None and own != total else ""
    return f"{format_count(total)} tokens/s{of_one}"


_NO_KERNELS = KernelPolicy()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportPolicy:
    """The content, the frequency and the location of the record.

    folder: the run folder.
    total_steps: number of the last step.
    every: steps between rows of `metrics.jsonl`. The first and the last step, and those with extra values, always have a row.
    plain_seconds: seconds between lines if there is no terminal, and between lines of evaluations and samples.
    tracker_every: steps between the rows sent to the logger.
    slowest_every: rows between lines about the slowest of several ranks; 0 for none.
    draws: draws a picture when the run ends.
    kernels: the steps whose ops are timed; they always have a row.
    profile: the steps to trace, if any.

    Raises:
        ValueError: `every` or `tracker_every` is less than 1.
    """

    folder: str
    total_steps: int
    every: int = 1
    plain_seconds: float = 10.0
    tracker: TrackerPolicy = TrackerPolicy(mode="disabled")
    tracker_every: int = 1
    slowest_every: int = 0
    draws: bool = True
    kernels: KernelPolicy = _NO_KERNELS
    profile: ProfilePolicy | None = None

    def __post_init__(self) -> None:
        for key, value in (("train.log_every", self.every), ("logger.every", self.tracker_every)):
            if value < 1:
                raise ValueError(f"{key}={value}: must be 1 step or more")


class _Outlet(Protocol):
    def row(self, row: dict[str, Any]) -> None: ...


class Reporter:
    """A context around the training loop. An exception inside writes a failed summary and keeps all rows.

    `step` and `finish` are collective calls.
    """

    def __init__(
        self,
        policy: ReportPolicy,
        *,
        comm: Comm,
        gauges: Gauges,
        parameters: int,
        first_step: int = 0,
        first_tokens: int = 0,
        digest: str = "",
        first_loss: float | None = None,
        last_loss: float | None = None,
        module: nn.Module | None = None,
        work: Work | None = None,
        acted: Mapping[str, Any] | None = None,
    ) -> None:
        """comm: communicates between all ranks.
        parameters: number of parameters of the full model.
        first_step, first_tokens, digest, first_loss, last_loss: values at the checkpoint from which the run continues.
        module: the model whose modules a profile names.
        work: operations of a step, needed on rank 0 for `mfu` in the rows.
        acted: keys of the configuration and the values that acted, if the program did not use the configured ones. Recorded in the
        summary.
        """
        self._acted = dict(acted or {})
        self._policy, self._comm, self._parameters = policy, comm, parameters
        self._gauges, self._first_step = gauges, first_step
        self._gather = gather = functools.partial(comm.gather_scalars, label="report")
        self._rows = RowBuilder(
            gauges=gauges,
            gather=gather,
            first_step=first_step,
            first_tokens=first_tokens,
            digest=digest,
            world_size=comm.size,
            work=work,
            slowest_every=policy.slowest_every,
        )
        self._rows.first_loss, self._rows.last_loss = first_loss, last_loss
        self._kernels = KernelLog(policy.kernels, gather=gather, device=gauges.device)
        self._profiler = StepProfiler(
            policy.profile,
            folder=policy.folder,
            rank=comm.rank,
            device=gauges.device,
            module=module,
            ledger=gauges.memory,
        )
        self._console = Console() if sys.stdout.isatty() else Console(width=140)
        self._folder: RunFolder | None = None  # this and the next two are set on rank 0 only
        self._progress: LiveProgress | PlainProgress | None = None
        self._tracker: Tracker | None = None
        self._finished: dict[str, Any] | None = None  # the summary of a run that had finished before; it is kept

    def past(self) -> dict[str, Any]:
        """Returns the arguments, except `first_step`, of a reporter that continues this record, as JSON for a checkpoint."""
        assert not self._rows.num_pending, "steps without a row are not in the digest yet: ask for one in `step`"
        losses = {"first_loss": self._rows.first_loss, "last_loss": self._rows.last_loss}
        finite = {name: loss for name, loss in losses.items() if loss is not None and math.isfinite(loss)}
        return {"first_tokens": self._rows.tokens, "digest": self._rows.digest.value, **finite}

    def __enter__(self) -> Self:
        if self._comm.rank == 0:
            self._open()
        self._gather(
            torch.zeros(1, device=self._gauges.device)
        )  # so that the other ranks' first step does not include `_open`
        self._rows.start()
        self._kernels.begin(self._rows.step + 1)
        self._profiler.begin(self._rows.step + 1)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self._kernels.close()
        self._profiler.close()
        if self._comm.rank == 0 and self._folder is not None:  # not after `finish`
            status = Status.interrupted if isinstance(error, KeyboardInterrupt) else Status.failed
            said = f"{kind.__name__}: {error}" if kind else "not finished"
            if status is Status.interrupted:
                said = INTERRUPTED
            with suppress(OSError):  # of a full disk, as the error that ends the run may be
                self._close(self._summary(status=status.value, error=said), failed=True)
                if self._finished is None:
                    write_failed_summary(self._policy.folder, error=said, status=status)

    def step(
        self,
        *,
        loss: Tensor,
        tokens: int,
        metrics: Callable[[], StepMetrics],
        module_metrics: Callable[[], Mapping[str, Any]] | None = None,
        row: bool = False,
        values: Mapping[str, Any] | None = None,
        logged: Logged | None = None,
    ) -> None:
        """Records one optimizer step.

        loss: this rank's mean over its micro-batches, a scalar. tokens: trained on in this step, over all ranks.
        metrics: called if the step has a row. module_metrics: called then too, for metrics of modules since the last row.
        row: forces a row. values: further ones, such as `validation_loss`; they imply a row. logged: the step's calls of `ztk.log`, read if
        the step has a row.

        Raises ValueError if two of these have a column of one name.
        """
        self._kernels.end()
        self._rows.add(loss=loss, tokens=tokens)
        step = self._rows.step
        timed = self._kernels.is_due(step)
        ends = (self._first_step + 1, self._policy.total_steps)
        if row or values or timed or step in ends or step % self._policy.every == 0:
            logged = logged or Logged()
            written, has_logged = self._rows.build(metrics(), num_logged=len(logged))
            parts = [values or {}, module_metrics() if module_metrics else {}, self._kernels.read() if timed else {}]
            if has_logged:
                parts.append(logged.means(self._comm))
            for more in parts:
                written = _joined(written, more=more)
            for outlet in self._outlets(step):
                outlet.row(written)
            if self._rows.slowest_line:
                self.say(self._rows.slowest_line)
            self._say_tracker_notice()
        self._end_profile(step)
        if step < self._policy.total_steps:
            self._kernels.begin(step + 1)
            self._profiler.begin(step + 1)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Excludes the time inside, for example of validations and checkpoints, from the steps."""
        with self._rows.aside(), self._kernels.aside():
            yield

    def say(self, text: str) -> None:
        """Prints on rank 0, above the progress bar if there is one."""
        if self._comm.rank == 0:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def follow(self, items: Sequence[_Item], *, work: str) -> Iterator[_Item]:
        """Yields the items. Work that takes longer than `plain_seconds` prints its progress, such as "held-out loss: 5 of 16 batches".

        work: a text with the place of the progress, such as "held-out loss: {} batches".
        """
        last = time.monotonic()
        for number, item in enumerate(items):
            if (now := time.monotonic()) - last >= self._policy.plain_seconds:
                last = now
                self.say(work.format(f"{number} of {len(items)}"))
            yield item

    def finish(self, **extra: Any) -> dict[str, Any]:
        """Writes the summary, draws the plot, prints the tables and returns the summary. extra: further keys of the summary.

        If the run had finished before and made no step now, the record is not changed.
        """
        self._kernels.close()
        self._profiler.close()
        ranks = self._comm.gather_objects(self._report())
        summary = _joined(self._summary(status="done", error=None) | rank_totals(ranks), more=extra)
        if self._comm.rank == 0:
            folder = self._policy.folder
            assert self._folder is not None
            if self._finished is not None:
                summary = self._finished
                self._close(summary, failed=False)
                self._console.print(
                    f"{describe_end(summary)}\nrecord: {folder}, as it was",
                    highlight=False,
                    markup=False,
                    soft_wrap=True,
                )
                return summary
            self._close(summary, failed=False)
            picture = _draw(folder) if self._policy.draws else ""
            print_tables(self._console, ranks=ranks, steps=self._rows.num_steps, kernels=self._kernels.means())
            end = f"{describe_end(summary)}\nrecord: {folder}{picture}"
            self._console.print(end, highlight=False, markup=False, soft_wrap=True)
        return summary

    def _end_profile(self, step: int) -> None:
        if not self._profiler.is_last(step):
            self._profiler.end()
            return
        with self._rows.aside():  # writing the files does not belong to a step
            self.say(self._profiler.close() or "")

    def _summary(self, *, status: str, error: str | None) -> dict[str, Any]:
        """Returns the keys for which rank 0 does not need the other ranks."""
        counts = {"status": status, "error": error, "steps": self._rows.step, **self._acted}
        size = {"parameters": self._parameters, "world_size": self._comm.size}
        return counts | self._rows.summary() | self._kernels.summary() | size | rank_totals([self._report()])

    def _report(self) -> dict[str, Any]:
        """Returns the counters that this rank sends to the others at the end."""
        return self._gauges.holdings() | {"flows": self._rows.flows}

    def _open(self) -> None:
        policy = self._policy
        self._folder = RunFolder(policy.folder)
        summary = read_summary(policy.folder)
        if self._first_step >= policy.total_steps and (summary.get("status"), summary.get("steps")) == (
            "done",
            self._first_step,
        ):
            self._finished = summary
            self._progress = PlainProgress(console=self._console, total_steps=policy.total_steps)
            return
        self._folder.write_environment(describe_environment(device=self._gauges.device, world_size=self._comm.size))
        self._folder.drop_rows_after(self._first_step)
        if policy.tracker.mode != "disabled":
            self._tracker = Tracker(policy.tracker, directory=policy.folder, first_step=self._first_step)
        shown = {"console": self._console, "total_steps": policy.total_steps}
        shown |= {"device": "GPU" if self._gauges.device.type == "cuda" else "rank"}
        if self._console.is_terminal:
            self._progress = LiveProgress(start_step=self._first_step, **shown)
        else:
            self._progress = PlainProgress(seconds=policy.plain_seconds, **shown)
        # A first step may take minutes: name the run before it.
        ranks = "1 rank" if self._comm.size == 1 else f"{self._comm.size} ranks"
        self.say(
            f"steps {self._first_step + 1} to {policy.total_steps}, {format_count(self._parameters)} parameters on {ranks}, "
            f"record: {policy.folder}"
        )
        self._say_tracker_notice()
        if self._acted:
            pairs = ", ".join(f"{key}={value}" for key, value in self._acted.items() if value is not None)
            self.say(f"not the configuration's, as the program has it: {pairs}")

    def _outlets(self, step: int) -> Iterator[_Outlet]:
        if self._folder is not None and self._progress is not None:
            yield self._folder
            yield self._progress
        if self._tracker is not None and (step % self._policy.tracker_every == 0 or step == self._policy.total_steps):
            yield self._tracker

    def texts(self, records: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """Sends records with equal keys to the logger, as the table `samples` of this step."""
        if self._tracker is not None and records:
            self._tracker.texts(records, step=step)
            self._say_tracker_notice()

    def _say_tracker_notice(self) -> None:
        if self._folder is not None and (notice := self._folder.take_notice()) is not None:
            self.say(notice)
        if self._tracker is not None and self._tracker.notice:
            self.say(self._tracker.notice)
            self._tracker.notice = None

    def _close(self, summary: dict[str, Any], *, failed: bool) -> None:
        assert self._progress is not None and self._folder is not None, "rank 0 closes"
        self._progress.close()
        try:
            self._folder.close()
            if self._finished is None:
                self._folder.write_summary(summary)
        finally:
            self._close_tracker(summary, failed=failed)

    def _close_tracker(self, summary: dict[str, Any], *, failed: bool) -> None:
        if self._tracker is not None:
            self._tracker.finish(summary, failed=failed)
            self._say_tracker_notice()
        self._folder = self._progress = self._tracker = None


def _joined(values: Mapping[str, Any], *, more: Mapping[str, Any]) -> dict[str, Any]:
    """Returns both. Numbers on a device are read. Raises ValueError for a name that both have."""
    if both := [name for name in more if name in values]:
        raise ValueError(f"{both[0]!r}: two values have this name, one of them ztk's: give yours another name")
    return {**values, **{name: value.item() if isinstance(value, Tensor) else value for name, value in more.items()}}


def _draw(folder: str) -> str:
    """Draws the picture. Returns the text that names it, or the reason why there is none."""
    from ztk.report.plot import plot_run  # imported late: matplotlib takes a second, and only rank 0 draws

    try:
        return f", picture: {plot_run(folder)}"
    except OSError as error:
        return f", no picture ({error.strerror})"
