"""The jobs of a command line and the table of a sweep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ztk.cli.planned_jobs import JobPlan
from ztk.report.status import Status, read_summary
from ztk.report.sweep import SweepRecord
from ztk.report.units import format_bytes, format_count

_TIERS = ("device", "host", "nvme")
_SPEEDS = {  # column -> key of a summary, and its text; shown if a job has it
    "tokens/s/GPU": ("tokens_per_second_per_gpu", format_count),
    "MFU": ("mfu", "{:.1%}".format),
    "HFU": ("hfu", "{:.1%}".format),
}
_STYLES = {
    Status.done: "green",
    Status.pending: "dim",
    Status.submitted: "cyan",
    Status.does_not_fit: "yellow",
    Status.running: "cyan",
}


class Outcome(IntEnum):
    """The result of a job. The value is the exit code of a command line with this job alone."""

    done = 0
    failed = 1
    refused = 2
    interrupted = 130


_CODES = {
    Status.done: Outcome.done,
    Status.submitted: Outcome.done,
    Status.refused: Outcome.refused,
    Status.interrupted: Outcome.interrupted,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run of a command line: its folder, its overrides and its state. plan: None if no plan was requested."""

    folder: Path
    overrides: tuple[str, ...]
    status: Status
    plan: JobPlan | None = None

    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`; empty if it does not exist or belongs to an earlier start."""
        return {} if self.status in (Status.running, Status.dead) else read_summary(self.folder)


def jobs_of(record: SweepRecord, *, folder: Path, plans: Mapping[str, JobPlan] | None = None) -> list[Job]:
    """Returns the jobs of a sweep with the current states of their folders. plans: by hash."""
    states = record.statuses(folder)
    return [
        Job(
            folder=folder / job.folder,
            overrides=job.words,
            status=states[job.folder],
            plan=(plans or {}).get(job.hash),
        )
        for job in record.jobs
    ]


def exit_code(jobs: Sequence[Job]) -> int:
    """Returns the exit code that all jobs share, or 1 if they differ. Ignores jobs that were skipped on request."""
    outcomes = {_CODES.get(job.status, Outcome.failed) for job in jobs if job.status is not Status.does_not_fit}
    return int(Outcome.failed if len(outcomes) > 1 else next(iter(outcomes), Outcome.done))


def print_jobs(jobs: Sequence[Job], *, console: Console) -> None:
    """Prints one row per job, then errors and folders."""
    table = Table(title=f"{len(jobs)} jobs", title_justify="left", title_style="bold", header_style="")
    summaries = [job.summary() for job in jobs]
    tiers = [tier for tier in _TIERS if any(summary.get(f"peak_memory.{tier}_bytes") for summary in summaries)]
    for column in ("job", "status"):
        table.add_column(column, no_wrap=True)
    table.add_column("overrides", overflow="fold")
    speeds = [name for name, (key, _) in _SPEEDS.items() if any(summary.get(key) is not None for summary in summaries)]
    for column in ("loss", "tokens/s", "s/step", *speeds, *[f"peak {tier}" for tier in tiers], "digest"):
        table.add_column(column, justify="right", no_wrap=True)
    planned = any(job.plan is not None for job in jobs)
    for column in ("plan: device", "plan: fits", "plan: s/step") if planned else ():
        table.add_column(column, justify="right", no_wrap=True)
    shared = set.intersection(*[set(job.overrides) for job in jobs]) if len(jobs) > 1 else set()
    for job, summary in zip(jobs, summaries, strict=True):
        own = " ".join(override for override in job.overrides if override not in shared)
        peaks = [_cell(summary.get(f"peak_memory.{tier}_bytes"), format_bytes) for tier in tiers]
        table.add_row(
            job.folder.name,
            Text(job.status.name, style=_STYLES.get(job.status, "red")),
            own,
            _cell(summary.get("final_loss"), "{:.4f}".format),
            _cell(summary.get("tokens_per_second"), format_count),
            _cell(summary.get("step_seconds_median"), "{:.3f}".format),
            *(_cell(summary.get(key), written) for key, written in map(_SPEEDS.__getitem__, speeds)),
            *peaks,
            str(summary.get("loss_digest") or "-")[:8],
            *(("-", "-", "-") if job.plan is None else job.plan.cells)[: 3 * planned],
        )
    console.print(table)
    if shared:
        console.print(
            f"all jobs: {' '.join(override for override in jobs[0].overrides if override in shared)}", highlight=False
        )
    for reason in dict.fromkeys(job.plan.reason for job in jobs if job.plan is not None and job.plan.reason):
        console.print(f"not planned: {reason}", highlight=False, markup=False, soft_wrap=True)
    for job, summary in zip(jobs, summaries, strict=True):
        if summary.get("error"):
            console.print(f"job {job.folder.name}: {summary['error']}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"record: {jobs[0].folder.parent}", highlight=False, soft_wrap=True)


def _cell(value: float | None, written) -> str:
    return "-" if value is None else written(value)
