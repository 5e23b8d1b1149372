"""Compares the predictions of `task=plan` with the measurements of runs."""

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas

from ztk.report.folder import read_rows
from ztk.report.history import Runs
from ztk.report.status import Status, read_status

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
