"""Losses over steps: the median of an arm's repeats, with the smallest and the largest."""

from collections.abc import Sequence
from typing import Any

import pandas

KEYS = ("loss", "validation_loss", "reward")
POINTS = 150  # per arm and curve; 100 arms take 0.4 MB


def curves(history: pandas.DataFrame, *, runs: pandas.DataFrame, arms: Sequence[str]) -> list[dict[str, Any]]:
    """Returns one entry per logged key of `KEYS` and arm: key, arm (index in `arms`), n (runs), and lists step, median, low and high.

    low, high: smallest and largest of the repeats; None if the arm has one run. At most `POINTS` evenly chosen steps, including the last.
    every: the interval between the chosen logged steps. Numbers have 6 digits. A loss that is not a number becomes None.
    """
    found = []
    arm_of = dict(zip(runs["run"], runs["arm"].map(str), strict=True))
    for key in KEYS:
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
    if key != KEYS[0]:
        steps = steps.dropna()  # logged only at some steps
    every = max(1, -(-len(steps) // POINTS))
    kept = steps.iloc[[*range(len(steps) - 1, -1, -every)][::-1]]
    count = int(rows["run"].nunique())
    curve = {"n": count, "every": every, "step": [int(step) for step in kept.index], "median": _short(kept["median"])}
    return curve | (
        {"low": _short(kept["min"]), "high": _short(kept["max"])} if count > 1 else {"low": None, "high": None}
    )


def _short(values: pandas.Series) -> list[float | None]:
    return [float(f"{value:.6g}") if abs(value) < float("inf") else None for value in values]
