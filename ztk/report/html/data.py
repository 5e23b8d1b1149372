"""The content of a report as plain lists and numbers: columns and rows of runs, arms, curves, failures, predictions."""

import json
import math
import os
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import pandas

from ztk.report.history import LARGER_IS_BETTER, load, own_words
from ztk.report.html.curves import curves
from ztk.report.html.failures import failures
from ztk.report.html.predictions import is_plan, predictions
from ztk.report.statistics import median_interval
from ztk.report.status import Status

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


def collect(folder: str | os.PathLike) -> dict[str, Any]:
    """Collects the data of the report of every run at or below `folder`. Uses only JSON's types; numbers are finite or None.

    `columns`: key, label, kind ("run", "setting", "metric") and form ("text", "number", "bytes", "seconds", "share") of every column.
    `runs`: rows in their order.
    `arms`: name, number of runs, and per metric [n, median, low, high] over the finished ones.
    `same`: the settings that all runs share.
    `curves`, `failures`, `predictions`: from the modules with these names. Runs of `task=plan` are predictions, not rows.

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
        "curves": curves(found.history, runs=runs, arms=list(names)),
        "failures": failures(runs, root=root),
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
