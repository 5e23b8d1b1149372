"""The jobs of a command line and the table of a sweep."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ztk.report.units import format_bytes, format_count

_TIERS = ("device", "host", "nvme")


class Outcome(IntEnum):
    """How a job ended; the value is the exit code of a command line whose only job it is."""

    done = 0
    failed = 1
    refused = 2
    interrupted = 130


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run of a command line: its folder, and its overrides on the command line."""

    folder: Path
    overrides: tuple[str, ...]
    outcome: Outcome

    def summary(self) -> dict[str, Any]:
        """`summary.json`; empty if there is none."""
        try:
            return json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}


def exit_code(jobs: Sequence[Job]) -> int:
    """The exit code of the outcome that all jobs share; 1 if their outcomes differ."""
    outcomes = {job.outcome for job in jobs}
    return int(Outcome.failed if len(outcomes) > 1 else next(iter(outcomes), Outcome.done))


def print_jobs(jobs: Sequence[Job], *, console: Console) -> None:
    """One row per job, then the errors and the folders."""
    table = Table(title=f"{len(jobs)} jobs", title_justify="left", title_style="bold", header_style="")
    summaries = [job.summary() for job in jobs]
    tiers = [tier for tier in _TIERS if any(summary.get(f"peak_memory.{tier}_bytes") for summary in summaries)]
    for column in ("job", "status"):
        table.add_column(column, no_wrap=True)
    table.add_column("overrides", overflow="fold")
    for column in ("loss", "tokens/s", "s/step", *[f"peak {tier}" for tier in tiers], "digest"):
        table.add_column(column, justify="right", no_wrap=True)
    shared = set.intersection(*[set(job.overrides) for job in jobs]) if len(jobs) > 1 else set()
    for job, summary in zip(jobs, summaries, strict=True):
        own = " ".join(override for override in job.overrides if override not in shared)
        style = "green" if job.outcome is Outcome.done else "red"
        peaks = [_cell(summary.get(f"peak_memory.{tier}_bytes"), format_bytes) for tier in tiers]
        table.add_row(
            job.folder.name,
            Text(job.outcome.name, style=style),
            own,
            _cell(summary.get("final_loss"), "{:.4f}".format),
            _cell(summary.get("tokens_per_second"), format_count),
            _cell(summary.get("step_seconds_median"), "{:.3f}".format),
            *peaks,
            str(summary.get("loss_digest") or "-")[:8],
        )
    console.print(table)
    if shared:
        console.print(
            f"all jobs: {' '.join(override for override in jobs[0].overrides if override in shared)}", highlight=False
        )
    for job, summary in zip(jobs, summaries, strict=True):
        if summary.get("error"):
            console.print(f"job {job.folder.name}: {summary['error']}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"record: {jobs[0].folder.parent}", highlight=False, soft_wrap=True)


def _cell(value: float | None, written) -> str:
    return "-" if value is None else written(value)
