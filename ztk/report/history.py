"""Reading finished runs back: one run folder, or a folder of them."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pandas

from ztk.report.folder import METRICS, SUMMARY, read_rows
from ztk.report.status import read_status


class Runs(NamedTuple):
    """`runs` has one row per run: `run`, its overrides, its summary. `history` has one row per logged step and run."""

    runs: pandas.DataFrame
    history: pandas.DataFrame


def load(path: str | os.PathLike) -> Runs:
    """Reads every run folder at or below `path`. `status` is that of `ztk.report.status`.

    The column `run` is the folder relative to `path` ("." for `path` itself).

    Raises:
        ValueError: there is no run.
    """
    root = Path(path)
    folders = sorted({file.parent for name in (SUMMARY, METRICS) for file in root.rglob(name)})
    if not folders:
        raise ValueError(f"{root} contains no run ({SUMMARY} or {METRICS}, at any depth)")
    runs, history = [], []
    for folder in folders:
        run = str(folder.relative_to(root))
        runs.append(
            {"run": run} | _overrides(folder) | _read_json(folder / SUMMARY) | {"status": read_status(folder).value}
        )
        history += [{"run": run} | row for row in read_rows(folder)]
    return Runs(runs=pandas.DataFrame(runs), history=pandas.DataFrame(history))


def _overrides(folder: Path) -> dict[str, Any]:
    """`overrides.json` is a dictionary, or a list of `key=value`."""
    values = _read_json(folder / "overrides.json")
    if isinstance(values, list):
        return dict(entry.split("=", 1) for entry in values if "=" in entry)
    return values


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
