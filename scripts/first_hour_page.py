"""The page of a first run on a GPU: its steps, and measured next to predicted times. Part of `scripts/first_hour.py read`."""

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.results import PREDICTED, commit_of, folder_of

REPOSITORY = Path(__file__).resolve().parents[1]


def read(results: Path) -> int:
    """Writes first_hour.json and first_hour.md to the GPU's folder of results. Returns 1 if a step was not done."""
    rows = [json.loads(line) for line in (results / "steps.jsonl").read_text().splitlines()]
    machine = next((row["result"] for row in rows if row["name"] == "machine" and "result" in row), {})
    folder = folder_of(str(machine.get("gpu", "unknown")))
    folder.mkdir(parents=True, exist_ok=True)
    kernels = results / "kernels.json"
    document = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit_of(REPOSITORY),
        **machine,
        "steps": rows,
        "kernels": json.loads(kernels.read_text()) if kernels.is_file() else [],
    }
    document["compared"] = list(compared(document, predicted=predictions_of(str(machine.get("gpu", "")))))
    (folder / "first_hour.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / "first_hour.md").write_text(page(document))
    print((folder / "first_hour.md").read_text())
    return int(any(row["status"] != "done" for row in rows))


def predictions_of(gpu: str) -> Sequence[Mapping[str, Any]]:
    """Rows of `scripts/predict_gpu.py` for a GPU with torch's name; none for a GPU that it does not know."""
    document = json.loads(PREDICTED.read_text())
    return next((rows for name, rows in document.items() if name != "commit" and name in gpu.lower().split()), ())


def compared(document: Mapping[str, Any], *, predicted: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows with measured and predicted seconds of the same work."""
    results = {row["name"]: row.get("result", {}) for row in document["steps"]}
    timed = {
        (f"kernels {row['op']}", tuple(row["shape"]), row["direction"]): row["p50"] / 1e3
        for row in document["kernels"]
        if row["provider"] == "ztk"
    }
    for row in predicted:
        if row["value"] is not None:
            measured = results.get(row["step"], {}).get(row["value"])
        else:
            measured = timed.get((row["step"], tuple(row["shape"]), row["direction"]))
        if measured is not None:
            numbers = {"measured": measured, "predicted": row["seconds"], "ratio": measured / row["seconds"]}
            yield {"work": row["work"], **numbers, "floor": row["floor"]}


def page(document: Mapping[str, Any]) -> str:
    """The tables of steps, of measured and predicted times, and of kernels with their shares of the measured limits."""
    lines = [
        f"# First run on {document.get('gpu', 'an unknown GPU')}",
        "",
        f"{document['date']}, commit {document['commit']}, torch {document.get('torch')}, triton {document.get('triton')}",
        "",
        "| step | status | seconds | kernels compiled | result |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [step_line(row) for row in document["steps"]]
    if document["compared"]:
        lines += [
            "",
            "## Measured and predicted",
            "",
            "Predictions: `scripts/predict_gpu.py`. The largest ratio first.",
            "",
            "| work | measured | predicted | ratio | floor |",
            "| --- | --- | --- | --- | --- |",
        ]
        for row in sorted(document["compared"], key=lambda row: -row["ratio"]):
            times = (f"{1e3 * row[name]:.3g} ms" for name in ("measured", "predicted"))
            floor = "" if row["floor"] is None else f"{1e3 * row['floor']:.3g} ms"
            lines.append(f"| {row['work']} | {' | '.join(times)} | {row['ratio']:.2f} | {floor} |")
    if document["kernels"]:
        lines += ["", "## Kernels", "", "| kernel | shape | direction | provider | ms | share of the limit |"]
        lines += ["| --- | --- | --- | --- | --- | --- |"]
        for row in document["kernels"]:
            shape, share = "x".join(map(str, row["shape"])), f"{row['share']:.0%} of {row['limit']}"
            lines.append(
                f"| {row['op']} | {shape} | {row['direction']} | {row['provider']} | {row['p50']:.3f} | {share} |"
            )
    return "\n".join(lines) + "\n"


def step_line(row: Mapping[str, Any]) -> str:
    """The numbers of a step, or the end of its error."""
    kept = {key: value for key, value in row.get("result", {}).items() if isinstance(value, int | float | str | bool)}
    shown = ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in kept.items()
    )
    shown = shown or " ".join(row.get("error", "").split())[-120:]
    return f"| {row['name']} | {row['status']} | {row['seconds']} | {row.get('compiled', '')} | {shown} |"
