"""The content of a report as plain lists and numbers: columns and rows of runs, arms, curves, failures, predictions."""

import json
import math
import os
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import pandas

from ztk.report.history import LARGER_IS_BETTER, load, own_words
from ztk.report.html.predictions import is_plan, predictions
from ztk.report.statistics import median_interval
from ztk.report.status import Status, read_summary

# Keys of summary.json -> labels on the page.
METRICS = {
    "tokens_per_second": "tokens/s",
    "tokens_per_second_per_gpu": "tokens/s/GPU",
    "mfu": "MFU",
    "hfu": "HFU",
    "step_seconds_median": "s/step",
    "final_loss": "final loss",
    "validation_loss": "validation loss",
    "reward_after": "reward",
    "peak_memory.device_bytes": "peak, device",
    "peak_memory.allocator_bytes": "peak, allocator",
    "peak_memory.host_bytes": "peak, host",
    "peak_memory.nvme_bytes": "peak, nvme",
    "steps": "steps",
}
_OF_THE_RUN = ("run", "status", "arm", "repeat")
_OF_THE_MACHINE = ("commit", "device_name", "host")
_CURVES = ("loss", "validation_loss", "reward")
_POINTS = 150  # per arm and curve; 100 arms take 0.4 MB
_FAILED = (Status.failed.value, Status.interrupted.value, Status.refused.value, Status.dead.value)
_LETTERS = 4_000  # per log
_BUDGET = 300_000  # letters in all logs
_CHUNK = 64_000  # bytes read per log


def collect(folder: str | os.PathLike) -> dict[str, Any]:
    """Collects the data of the report of every run at or below `folder`. Uses only JSON's types; numbers are finite or None.

    `columns`: key, label, kind ("run", "setting", "metric") and form ("text", "number", "bytes", "seconds", "share") of every column.
    `runs`: rows in their order.
    `arms`: name, number of runs, and per metric [n, median, low, high] over the finished ones.
    `same`: the settings that all runs share.
    `curves`: see `_curves`. `failures`: see `_failures`. `predictions`: of `ztk.report.html.predictions`; runs of `task=plan` are
    predictions, not rows.

    Raises:
        ValueError: there is no run.
    """
    root = Path(folder)
    found = load(root)
    plans = [run for run in found.runs["run"] if is_plan(root / run)]
    runs = found.runs[~found.runs["run"].isin(plans)].reset_index(drop=True)
    settings = sorted(found.settings, key=lambda key: "." in key)
    metrics = [key for key in METRICS if key in runs and runs[key].notna().any() and (runs[key] != 0).any()]
    if "tokens_per_second" in metrics and _equal(runs, "tokens_per_second_per_gpu", "tokens_per_second"):
        metrics = [key for key in metrics if key != "tokens_per_second_per_gpu"]
    words = [str(arm).split() for arm in runs["arm"]]
    named = {word.split("=", 1)[0].lstrip("+~") for arm in words for word in arm}
    differing, same = _differing(runs, settings=settings, named=named)
    columns = [
        *({"key": key, "label": key, "kind": "run", "form": "text"} for key in _OF_THE_RUN),
        *(_setting(key, runs=runs, named=key in named) for key in differing),
        *({"key": key, "label": METRICS[key], "kind": "metric", "form": _form(key)} for key in metrics),
    ]
    for column in columns:
        column["larger"] = column["key"] in LARGER_IS_BETTER
    names = {arm: own or arm or "(no override)" for arm, own in own_words(runs["arm"]).items()}
    return {
        "title": root.absolute().name,
        "machine": {key: _seen(runs[key], key=key) for key in _OF_THE_MACHINE if key in runs},
        "columns": columns,
        "runs": [[plain(row[column["key"]]) for column in columns] for row in runs.to_dict("records")],
        "arms": [_arm(arm, name=name, runs=runs, metrics=metrics) for arm, name in names.items()],
        "same": same,
        "curves": _curves(found.history, runs=runs, arms=list(names)),
        "failures": _failures(runs, root=root),
        "predictions": predictions(found, plans=plans, settings=settings, root=root),
    }


def _equal(runs: pandas.DataFrame, one: str, other: str) -> bool:
    """Returns whether every run with `one` has the same number in `other`."""
    return one in runs and bool((runs[one].isna() | (runs[one] == runs[other])).all())


def _seen(values: pandas.Series, *, key: str) -> list[str]:
    """Returns the distinct values. Commits are shortened to 12 digits and the mark of a changed checkout."""
    texts = sorted(set(values.dropna().map(str)))
    return [text[:12] + "+" * text.endswith("+") for text in texts] if key == "commit" else texts


def plain(value: Any) -> Any:
    """Converts a value for JSON: a text, a switch, a finite number or None. Lists become text."""
    if isinstance(value, list | tuple | dict):
        return json.dumps(value)
    if value is None or value is pandas.NA:
        return None
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _differing(
    runs: pandas.DataFrame, *, settings: Sequence[str], named: Container[str]
) -> tuple[list[str], dict[str, Any]]:
    """Returns the settings with two or more values, and the settings with one.

    A missing key counts as a value if a command line names the key. Other keys may be missing because they are unknown for a pending run.
    """
    differing, same = [], {}
    for key in settings:
        values = {json.dumps(plain(value)): plain(value) for value in runs[key]}
        if key not in named:
            values.pop("null", None)
        if len(values) > 1:
            differing.append(key)
        elif values.keys() - {"null"}:
            same[key] = next(iter(values.values()))
    return differing, same


def _setting(key: str, *, runs: pandas.DataFrame, named: bool) -> dict[str, Any]:
    """Describes the column of a setting. named: whether a command line names the key; the page initially hides other settings."""
    kinds = {type(plain(value)) for value in runs[key]} - {type(None)}
    form = "number" if kinds <= {int, float} else "text"
    return {"key": key, "label": key, "kind": "setting", "form": form, "named": named}


def _form(key: str) -> str:
    if key in ("mfu", "hfu"):
        return "share"
    return "bytes" if key.endswith("_bytes") else "seconds" if "_seconds" in key else "number"


def _arm(arm: str, *, name: str, runs: pandas.DataFrame, metrics: Sequence[str]) -> dict[str, Any]:
    own = runs[runs["arm"] == arm]
    done = own[own["status"] == Status.done.value]
    found: dict[str, list[Any]] = {}
    for key in metrics:
        values = [float(value) for value in done[key].dropna() if math.isfinite(value)]
        if values:
            interval = median_interval(values)
            found[key] = [interval.n, *(plain(end) for end in (interval.median, interval.low, interval.high))]
    return {"arm": arm, "name": name, "runs": len(own), "metrics": found}


# Losses over steps


def _curves(history: pandas.DataFrame, *, runs: pandas.DataFrame, arms: Sequence[str]) -> list[dict[str, Any]]:
    """Returns one entry per logged key of `_CURVES` and arm: key, arm (index in `arms`), n (runs), and lists step, median, low and high.

    low, high: smallest and largest of the repeats; None if the arm has one run. At most `_POINTS` evenly chosen steps, including the last.
    every: the interval between the chosen logged steps. Numbers have 6 digits. A loss that is not a number becomes None.
    """
    found = []
    arm_of = dict(zip(runs["run"], runs["arm"].map(str), strict=True))
    for key in _CURVES:
        if key not in history:
            continue
        rows = history[["run", "step", key]].dropna(subset=["step"])
        rows = rows.assign(arm=rows["run"].map(arm_of)).dropna(subset=["arm"])
        for arm, own in rows.groupby("arm", sort=False):
            if own[key].notna().any():
                found.append({"key": key, "arm": arms.index(str(arm)), **_curve(own, key=key)})
    return found


def _curve(rows: pandas.DataFrame, *, key: str) -> dict[str, Any]:
    rows = rows.assign(**{key: rows[key].astype(float)})
    steps = rows.groupby("step")[key].agg(["median", "min", "max"])
    if key != _CURVES[0]:
        steps = steps.dropna()  # logged only at some steps
    every = max(1, -(-len(steps) // _POINTS))
    kept = steps.iloc[[*range(len(steps) - 1, -1, -every)][::-1]]
    count = int(rows["run"].nunique())
    curve = {"n": count, "every": every, "step": [int(step) for step in kept.index], "median": _short(kept["median"])}
    return curve | (
        {"low": _short(kept["min"]), "high": _short(kept["max"])} if count > 1 else {"low": None, "high": None}
    )


def _short(values: pandas.Series) -> list[float | None]:
    return [float(f"{value:.6g}") if abs(value) < float("inf") else None for value in values]


# Runs that did not end well


def _failures(runs: pandas.DataFrame, *, root: Path) -> list[dict[str, Any]]:
    """Returns run (its row), status, error (None if nothing was recorded), log (the file, relative to the run) and the end of its
    text.
    """
    places = [place for place, status in enumerate(runs["status"]) if status in _FAILED]
    letters = min(_LETTERS, _BUDGET // max(1, len(places)))
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
