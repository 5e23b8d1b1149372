"""Runs that did not end well, with the end of their logs."""

import os
from pathlib import Path
from typing import Any

import pandas

from ztk.report.status import Status, read_summary

LETTERS = 4_000  # per log
BUDGET = 300_000  # letters in all logs
_FAILED = (Status.failed.value, Status.interrupted.value, Status.refused.value, Status.dead.value)
_CHUNK = 64_000  # bytes read per log


def failures(runs: pandas.DataFrame, *, root: Path) -> list[dict[str, Any]]:
    """Returns run (its row), status, error (None if nothing was recorded), log (the file, relative to the run) and the end of its
    text.
    """
    places = [place for place, status in enumerate(runs["status"]) if status in _FAILED]
    letters = min(LETTERS, BUDGET // max(1, len(places)))
    found = []
    for place in places:
        folder = root / runs["run"][place]
        log = _log(folder, error=str(read_summary(folder).get("error") or ""))
        found.append(
            {
                "run": place,
                "status": runs["status"][place],
                "error": read_summary(folder).get("error"),
                "log": str(log.relative_to(folder)) if log else None,
                "end": _end(log)[-letters:] if log else "",
            }
        )
    return found


def _log(folder: Path, *, error: str) -> Path | None:
    """Returns the log of the rank that the error names ("rank 1: ..."), else of the first rank with a traceback, else the first non-empty
    one.
    """
    logs = sorted(folder.glob("ranks/rank*.log"), key=lambda log: (len(log.name), log.name))
    logs = [log for log in logs if log.stat().st_size]
    named = [log for log in logs if error.startswith(f"{log.stem.replace('rank', 'rank ')}:")]
    raised = [log for log in logs if "Traceback" in _end(log)]
    return next(iter([*named, *raised, *logs]), None)


def _end(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(-min(_CHUNK, log.stat().st_size), os.SEEK_END)
        return file.read().decode("utf-8", errors="replace")
