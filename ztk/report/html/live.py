"""A report that follows runs: the file is rewritten when a run has changed, and the page reloads itself."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from ztk.core.policies.records import replace_file
from ztk.report.folder import METRICS, SUMMARY
from ztk.report.heartbeat import HEARTBEAT
from ztk.report.html.data import collect
from ztk.report.html.page import choose_target, plotly_script, render
from ztk.report.status import Status, read_status
from ztk.report.sweep import SWEEP

SECONDS = 10.0
_UNFINISHED = (Status.pending.value, Status.submitted.value, Status.running.value)


def follow(
    folder: str | os.PathLike,
    *,
    to: str | os.PathLike | None = None,
    seconds: float = SECONDS,
    wait: Callable[[float], None] = time.sleep,
) -> Path:
    """Writes the report like `write_report`, and rewrites it every `seconds` if a run has changed, until no run is pending or running.

    The page reloads itself at the same interval and keeps its filter, baseline, sorting and position. It waits while an axis is being
    brushed. The last page, also after an interrupt, does not reload.

    Raises:
        ValueError: as `write_report`; `seconds` is not positive.
    """
    if not seconds > 0:
        raise ValueError(
            f"--live={seconds:g}: seconds between two pages are more than 0; leave them out for {SECONDS:g}"
        )
    target, plotly = choose_target(folder, to=to), plotly_script()
    seen = None
    try:
        while True:
            marks = _marks(Path(folder))
            if marks != seen:
                data = collect(folder)
                if not _goes_on(data):
                    break
                live = {"seconds": seconds, "written": time.strftime("%H:%M:%S")}
                replace_file(target, text=render(data | {"live": live}, plotly=plotly))
                seen = marks
            wait(seconds)
    except KeyboardInterrupt:
        pass
    replace_file(target, text=render(collect(folder), plotly=plotly))
    return target


def _marks(root: Path) -> dict[Path, tuple[int, int] | str]:
    """Returns a fingerprint that changes when a run changes: times and sizes of its files, and whether its process is alive."""
    found: dict[Path, tuple[int, int] | str] = {}
    for name in (METRICS, SUMMARY, SWEEP):
        for file in root.rglob(name):
            one = file.stat()
            found[file] = (one.st_mtime_ns, one.st_size)
    return found | {file: read_status(file.parent).value for file in root.rglob(HEARTBEAT)}


def _goes_on(data: dict) -> bool:
    place = [column["key"] for column in data["columns"]].index("status")
    return any(row[place] in _UNFINISHED for row in data["runs"])
