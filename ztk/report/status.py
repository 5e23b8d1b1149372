"""Determines the state of a run from its folder alone, also after any of its processes was killed."""

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Any

from ztk.report.folder import JOB, METRICS, SUMMARY
from ztk.report.heartbeat import HEARTBEAT, is_alive, read_heartbeat

INTERRUPTED = "interrupted"  # the recorded error of a run that Ctrl-C or a signal ended
_FOREIGN = "{}: is not the summary of a run of ztk; take it out of the folder, or name another folder"


_CUT = "{}: is empty, cut or no JSON; remove it, and the run counts as one that did not end"


class RecordError(ValueError):
    """A file of a run's folder cannot be read. The message names the file and the fix."""


class Status(StrEnum):
    """The state of a run."""

    pending = "pending"  # has not started
    submitted = "submitted"  # as a job of Slurm, which has not started it
    running = "running"  # its process is alive
    dead = "dead"  # started, and its process ended without a summary
    done = "done"
    failed = "failed"
    interrupted = "interrupted"  # by Ctrl-C or SIGTERM
    refused = "refused"  # its configuration was refused
    does_not_fit = "does_not_fit"  # not started, because a device lacks memory according to the plan


def read_status(folder: str | os.PathLike) -> Status:
    """Returns the state of the run in `folder`.

    A heartbeat of a living process means running, whatever files an earlier start has left. Without one, a job of Slurm that is newer than
    these files means submitted. Otherwise the summary counts, unless it is older than a process that died.

    Raises:
        RecordError: `summary.json` or the heartbeat is truncated, or belongs to another program.
    """
    path = Path(folder)
    try:
        beat = read_heartbeat(path)
    except ValueError:
        raise RecordError(_CUT.format(path / HEARTBEAT)) from None
    summary = read_summary(path)
    if beat is not None and is_alive(beat):
        return Status.running
    submitted = _time_of(path / JOB)
    if submitted and all(submitted >= _time_of(path / name) for name in (SUMMARY, HEARTBEAT, METRICS)):
        return Status.submitted
    if beat is not None and (not summary or _time_of(path / SUMMARY) < beat["started"]):
        return Status.dead
    if summary:
        if summary.get("status") not in list(Status):
            raise RecordError(_FOREIGN.format(path / SUMMARY))
        status = Status(summary["status"])
        # Earlier versions recorded an interrupt as a failure.
        return Status.interrupted if status is Status.failed and summary.get("error") == INTERRUPTED else status
    started = any((path / name).exists() for name in (METRICS, HEARTBEAT, "config.yaml"))
    return Status.dead if started else Status.pending


def _time_of(path: Path) -> float:
    """The time of the last write, 0 without the file."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def read_summary(folder: str | os.PathLike) -> dict[str, Any]:
    """Returns `summary.json`, empty if there is none. Raises RecordError if it is truncated, or belongs to another program."""
    path = Path(folder, SUMMARY)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:  # JSONDecodeError and UnicodeDecodeError
        raise RecordError(_CUT.format(path)) from None
    if not isinstance(values, dict):
        raise RecordError(_FOREIGN.format(path))
    return values
