"""Plots a run from its folder."""

import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ztk.report.folder import SUMMARY, read_rows
from ztk.report.units import format_bytes, format_count

_TIERS = ("device", "host", "nvme")
_COLORS = {
    "parameters": "#4477aa",
    "gradients": "#ee6677",
    "optimizer": "#228833",
    "gathered": "#ccbb44",
    "gradients in flight": "#aa3377",
}
_OTHER_COLORS = ("#66ccee", "#bbbbbb", "#ee8866", "#44bb99", "#777777", "#ddaacc", "#99ddff", "#aaaa00")


def plot_run(folder: str | os.PathLike) -> Path:
    """Writes `run.png` and `run.svg` into the run's folder, and returns the PNG's path.

    Shows loss and tokens per second over steps, reward over divergence if there are rewards, and the model state per tier at its peak.
    """
    path = Path(folder)
    rows = list(read_rows(path))
    summary = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
    with matplotlib.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        rewarded = [row for row in rows if row.get("reward") is not None]
        ratios = (3, 2, 3, 2) if rewarded else (3, 2, 2)
        figure = Figure(
            figsize=(4 * len(ratios) + 4, 4.5), layout="constrained"
        )  # no pyplot: no global state, no display
        panels = figure.subplots(1, len(ratios), width_ratios=ratios)
        _draw_loss(panels[0], rows=rows, summary=summary)
        draw_speed(panels[1], rows=rows)
        if rewarded:
            draw_reward(panels[2], rows=rewarded)
        draw_memory(panels[-1], summary=summary)
        figure.savefig(path / "run.png", dpi=120)
        figure.savefig(path / "run.svg", metadata={"Date": None})
    return path / "run.png"


def _draw_loss(axes: Axes, *, rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    axes.set(title="loss", xlabel="step", ylabel="nats per token")
    axes.grid(alpha=0.25)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not rows:
        axes.text(0.5, 0.5, "no step was logged", ha="center", va="center", transform=axes.transAxes)
        return
    steps = [row["step"] for row in rows]
    losses = [math.nan if row["loss"] is None else row["loss"] for row in rows]
    axes.plot(steps, losses, color="#4477aa", alpha=0.3, linewidth=1)
    axes.plot(steps, _smooth(losses, span=len(losses) / 25), color="#4477aa", linewidth=2, label="training")
    if held_out := _held_out(rows, summary=summary):
        axes.plot(held_out.keys(), held_out.values(), "o-", color="#ee6677", markersize=4, label="held out")
    if (entropy := summary.get("bigram_entropy")) is not None:
        axes.axhline(entropy, color="black", linestyle="--", linewidth=1, label=f"byte bigrams ({entropy:.3f})")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3)


def draw_speed(axes: Axes, *, rows: list[dict[str, Any]]) -> None:
    """Draws tokens per second over the logged steps."""
    axes.set(title="throughput", xlabel="step", ylabel="tokens per second")
    axes.grid(alpha=0.25)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: format_count(value))
    axes.plot([row["step"] for row in rows], [row["tokens_per_second"] for row in rows], color="#228833", linewidth=1)
    axes.set_ylim(bottom=0)


def draw_reward(axes: Axes, *, rows: list[dict[str, Any]]) -> None:
    """Draws the mean reward of every step over its divergence from the reference, or over the steps if that was not measured."""
    measured = all(row.get("kl") is not None for row in rows)
    label = "KL to the reference, nats per answer" if measured else "step"
    axes.set(title="reward", xlabel=label, ylabel="mean over sampled answers")
    axes.grid(alpha=0.25)
    places = [row["kl" if measured else "step"] for row in rows]
    if all(row.get("true_reward") is not None for row in rows):
        axes.scatter(
            places, [row["true_reward"] for row in rows], color="#ee6677", s=8, marker="x", label="true reward"
        )
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    dots = axes.scatter(places, [row["reward"] for row in rows], c=[row["step"] for row in rows], s=12, cmap="viridis")
    axes.figure.colorbar(dots, ax=axes, label="step")


def _smooth(values: list[float], *, span: float) -> list[float]:
    """Returns an exponential mean over about `span` values, without bias towards the start. Skips NaN."""
    keep, total, weight, smooth = max(0.0, (span - 1) / (span + 1)), 0.0, 0.0, []
    for value in values:
        if not math.isnan(value):
            total, weight = keep * total + value, keep * weight + 1
        smooth.append(total / weight if weight else math.nan)
    return smooth


def _held_out(rows: list[dict[str, Any]], *, summary: dict[str, Any]) -> dict[int, float]:
    """Returns step -> validation loss from the rows, and the last one from the summary."""
    measured = {row["step"]: row["validation_loss"] for row in rows if row.get("validation_loss") is not None}
    if (last := summary.get("validation_loss")) is not None:
        measured[summary["steps"]] = last
    return measured


def draw_memory(axes: Axes, *, summary: dict[str, Any]) -> None:
    """Draws a bar per tier in use: the categories of its peak."""
    axes.set(title="a rank's state at its peak")
    axes.yaxis.set_major_formatter(lambda nbytes, _: format_bytes(nbytes))
    axes.grid(alpha=0.25, axis="y")
    axes.set_axisbelow(True)
    tiers = [tier for tier in _TIERS if summary.get(f"peak_memory.{tier}_bytes")] or ["device"]
    drawn = set()
    found = {tier: _categories(summary, tier=tier) for tier in tiers}
    others = [name for name in dict.fromkeys(name for held in found.values() for name in held) if name not in _COLORS]
    colors = _COLORS | dict(zip(others, itertools.cycle(_OTHER_COLORS), strict=False))
    for position, tier in enumerate(tiers):
        bottom = 0.0
        for category, nbytes in found[tier].items():
            label = None if category in drawn else category
            axes.bar(position, nbytes, bottom=bottom, width=0.6, color=colors[category], label=label)
            drawn.add(category)
            bottom += nbytes
        peak = summary.get(f"peak_memory.{tier}_bytes", 0)
        axes.annotate(
            format_bytes(peak), (position, max(peak, bottom)), (0, 4), textcoords="offset points", ha="center"
        )
        axes.hlines(
            peak, position - 0.38, position + 0.38, color="black", linewidth=1.5, label=None if position else "peak"
        )
    axes.set_xticks(range(len(tiers)), tiers)
    axes.set_xlim(-0.8, len(tiers) - 0.2)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _categories(summary: dict[str, Any], *, tier: str) -> dict[str, int]:
    """Returns `peak_memory.{tier}.{category}_bytes` of the summary."""
    start = f"peak_memory.{tier}."
    return {
        key[len(start) : -len("_bytes")].replace("_", " "): value
        for key, value in summary.items()
        if key.startswith(start)
    }
