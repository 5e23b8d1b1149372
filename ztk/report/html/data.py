"""The content of a report as plain lists and numbers: columns and rows of runs, arms, curves, failures, predictions."""

import json
import math
import os
import statistics
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas

from ztk.report.folder import read_rows
from ztk.report.history import LARGER_IS_BETTER, Runs, load, own_words
from ztk.report.statistics import median_interval
from ztk.report.status import Status, read_status, read_summary

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
    `curves`: see `_curves`. `failures`: see `_failures`. `predictions`: of `ztk.report.html.data`; runs of `task=plan` are
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


# Compares the predictions of `task=plan` with the measurements of runs.

PLAN = "plan.json"
# Settings that determine the bytes of a run: sections, and single keys of others.
_SECTIONS = ("model.", "zero.", "offload.", "precision.", "recompute.", "topology.", "lora.")
_KEYS = ("optimizer.name", "data.seq_len", "train.micro_batch_size", "train.accumulation_steps", "launch.ranks")
# Location and speed of the bytes do not matter. Pinning does not either: plans are for GPUs, whose host memory is pinned.
_WITHOUT_EFFECT = ("offload.nvme_path", "offload.threads", "offload.pin_memory")


def is_plan(folder: Path) -> bool:
    """Returns whether the folder has a run of `task=plan`: done, with `plan.json` and no step. A job that does not fit also has a
    plan.
    """
    return (folder / PLAN).exists() and read_status(folder) is Status.done and next(read_rows(folder), None) is None


def predictions(found: Runs, *, plans: Sequence[str], settings: Sequence[str], root: Path) -> list[dict[str, Any]]:
    """Returns run (its row among the non-plans), plan (its folder), quantity, predicted and measured, for each finished run with a plan.

    The plan is in the run's own folder, or in a run of `task=plan` with the same model, layout, precision and batch. Quantities: bytes of
    state between steps by tier and category; the peak of the device, if the allocator measured it; bytes through the network and the disk
    in the median step; its seconds, if the plan is for specific hardware.
    """
    deciding = [key for key in settings if key not in _WITHOUT_EFFECT and (key in _KEYS or key.startswith(_SECTIONS))]
    rows = {row["run"]: row for row in found.runs.to_dict("records")}
    known = {_identity(rows[plan], keys=deciding): plan for plan in plans}
    result = []
    for place, run in enumerate(name for name in rows if name not in plans):
        plan = run if (root / run / PLAN).exists() else known.get(_identity(rows[run], keys=deciding))
        if plan is None or rows[run]["status"] != Status.done.value:
            continue
        predicted = json.loads((root / plan / PLAN).read_text(encoding="utf-8"))
        for quantity, expected, measured in _pairs(predicted, row=rows[run], folder=root / run):
            result.append(
                {"run": place, "plan": plan, "quantity": quantity, "predicted": expected, "measured": measured}
            )
    return result


def _identity(row: dict[str, Any], *, keys: Sequence[str]) -> str:
    return json.dumps([None if _missing(row[key]) else str(row[key]) for key in keys])


def _pairs(predicted: dict[str, Any], *, row: dict[str, Any], folder: Path) -> Iterator[tuple[str, float, float]]:
    measured = {key: value for key, value in row.items() if not _missing(value)}
    for key, value in predicted.items():
        if key.startswith("memory.") and value and key in measured:
            yield key, value, float(measured[key])
    if allocated := measured.get("peak_memory.allocator_bytes"):
        yield "peak_memory.device_bytes", predicted["peak_memory.device_bytes"], float(allocated)
    steps = list(read_rows(folder))
    for key in [
        key for key in (steps[-1] if steps else ()) if key.startswith(("comm.", "io.")) and key.endswith("_bytes")
    ]:
        per_step = statistics.median(step.get(key) or 0 for step in steps)
        expected = _wire(predicted, kind=key.split(".")[1]) if key.startswith("comm.") else predicted.get(key, 0)
        if expected or per_step:
            yield f"{key} per step", expected, float(per_step)
    if predicted.get("step_seconds") and measured.get("step_seconds_median"):
        yield "step_seconds", predicted["step_seconds"], float(measured["step_seconds_median"])


def _wire(predicted: dict[str, Any], *, kind: str) -> int:
    """Returns the bytes of one kind of collective over all axes."""
    return sum(value for key, value in predicted.items() if key.startswith("comm.") and key.endswith(f".{kind}"))


def _missing(value: Any) -> bool:
    return value is None or value is pandas.NA or (isinstance(value, float) and math.isnan(value))
