"""Makes one self-contained HTML file from a folder of runs: data, style, plotly and scripts are embedded."""

import base64
import hashlib
import html
import json
import os
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from ztk.core.policies.records import replace_file
from ztk.report.folder import METRICS, SUMMARY
from ztk.report.heartbeat import HEARTBEAT
from ztk.report.html.data import collect
from ztk.report.status import Status, read_status
from ztk.report.sweep import SWEEP

NAME = "report.html"
_SCRIPTS = ("state.js", "table.js", "charts.js", "parallel.js", "details.js", "live.js")


def write_report(folder: str | os.PathLike, *, to: str | os.PathLike | None = None) -> Path:
    """Writes the report of every run at or below `folder` and returns its path: `to`, or `report.html` in the folder.

    Texts of runs (overrides, errors, logs) are data in a JSON element, never markup. The page's Content-Security-Policy allows only its
    own scripts, by their hashes, and no connections.

    Raises:
        ValueError: there is no run; plotly is missing; the folder of `to` does not exist.
    """
    target = choose_target(folder, to=to)
    replace_file(target, text=render(collect(folder), plotly=plotly_script()))
    return target


def choose_target(folder: str | os.PathLike, *, to: str | os.PathLike | None) -> Path:
    """Returns the file of a report of `folder`. Raises ValueError if the folder of `to` does not exist."""
    target = Path(folder, NAME) if to is None else Path(to)
    if not target.absolute().parent.is_dir():
        raise ValueError(f"--to={target}: the folder {target.parent} does not exist; make it, or choose another --to")
    return target


def plotly_script() -> str:
    """Returns the javascript of plotly from its Python package.

    Raises:
        ValueError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ValueError('the HTML report needs plotly; install it by pip install "ztk[report]"') from error
    return get_plotlyjs()


def render(data: dict[str, Any], *, plotly: str) -> str:
    """Renders the page as text.

    data: result of `ztk.report.html.data.collect`, with `live` (seconds, written) for a page that reloads itself. plotly: javascript that
    defines `Plotly`.

    Raises:
        ValueError: a script would end its element.
    """
    scripts = [plotly, "\n".join(_read(name) for name in _SCRIPTS)]
    for script in scripts:
        if "</script" in script.lower():
            raise ValueError("a script contains </script, which would end its element")
    return Template(_read("page.html")).substitute(
        policy=" ".join(f"'sha256-{_digest(script)}'" for script in scripts),
        title=html.escape(f"Runs of {data['title']}"),
        style=_read("report.css"),
        data=embedded(data),
        plotly=scripts[0],
        script=scripts[1],
    )


def embedded(data: Any) -> str:
    """Returns JSON that is safe inside an element: no character of it ends the element or opens a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _read(name: str) -> str:
    return resources.files("ztk.report.html").joinpath(name).read_text(encoding="utf-8")


# A report that follows runs: the file is rewritten when a run has changed, and the page reloads itself.

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
