"""Draws docs/engine.svg, the speed of ztk next to its peers, from experiments/results/cpu/engine.jsonl."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
RESULTS, CHART = ROOT / "experiments" / "results" / "cpu" / "engine.jsonl", ROOT / "docs" / "engine.svg"
DTYPES = ("fp32", "bf16")
# Strategy -> engine -> its name in the results.
STRATEGIES = {
    "stage 0": {"DDP": "ddp", "DeepSpeed": "deepspeed0", "ztk": "ztk0"},
    "stage 1": {"DeepSpeed": "deepspeed1", "ZeroRedundancyOptimizer": "zro", "ztk": "ztk1"},
    "stage 2": {"DeepSpeed": "deepspeed2", "FSDP2": "fsdp2-keep", "ztk": "ztk2"},
    "stage 3": {"DeepSpeed": "deepspeed3", "FSDP2": "fsdp2", "ztk": "ztk3"},
    "stage 3, cpu": {"DeepSpeed": "deepspeed3+cpu", "ztk": "ztk3+cpu"},
    "stage 3, nvme": {"DeepSpeed": "deepspeed3+nvme", "ztk": "ztk3+nvme"},
}
COLORS = {
    "ztk": "#2563eb",
    "FSDP2": "#f59e0b",
    "DDP": "#9ca3af",
    "ZeroRedundancyOptimizer": "#10b981",
    "DeepSpeed": "#6b7280",
}


def main() -> None:
    """Writes the chart."""
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    plt.rcParams.update({"svg.hashsalt": "ztk", "font.size": 9, "svg.fonttype": "path"})
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, dtype in zip(axes, DTYPES, strict=True):
        draw(axis, speeds=latest(rows, dtype=dtype), title=dtype)
    axes[0].invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(handles, COLORS, loc="lower center", ncols=len(COLORS), frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(CHART, metadata={"Date": None})


def latest(rows: list[dict[str, Any]], *, dtype: str) -> dict[str, float]:
    """Tokens per second by candidate, relative to the compute-only loop of the same run. The last run of a candidate counts."""
    compute, found = 0.0, {}
    for row in rows:
        if [row.get(name) for name in ("model", "modules", "dtype", "ranks")] != ["30m", "ztk", dtype, 2]:
            continue
        if row["candidate"] == "compute":
            compute = row["tokens_per_second"]
        elif compute:
            found[row["candidate"]] = row["tokens_per_second"] / compute
    return found


def draw(axis: Any, *, speeds: dict[str, float], title: str) -> None:
    """One group of bars per strategy."""
    place, ticks = 0.0, []
    for engines in STRATEGIES.values():
        first = place
        for engine, candidate in engines.items():
            axis.barh(place, speeds[candidate], color=COLORS[engine], height=0.9)
            axis.text(speeds[candidate] + 0.01, place, f"{speeds[candidate]:.2f}", va="center", fontsize=8)
            place += 1
        ticks.append((first + place - 1) / 2)
        place += 0.7
    axis.set_yticks(ticks, STRATEGIES)
    axis.set_xlim(0, 1.15)
    axis.set_xlabel("speed relative to forward, backward and AdamW alone")
    axis.set_title(title)
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
