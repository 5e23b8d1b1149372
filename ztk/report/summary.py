"""The metrics of `summary.json`."""

import statistics
from collections.abc import Sequence
from typing import Any

from ztk.report.rows import RowBuilder


def summarise(rows: RowBuilder) -> dict[str, Any]:
    """Returns the metrics of the steps.

    `tokens_per_second`, `mfu` and `hfu` are of the median step, so that pauses and the first step's warm-up do not count.
    """
    made = max(1, rows.num_steps)
    median = statistics.median(rows.step_seconds) if rows.step_seconds else None
    speed = rows.num_tokens / made / median if median else None
    work = rows.work.shares(median) | rows.work.as_dict() if rows.work and median else {}
    return {
        "first_loss": rows.first_loss,
        "final_loss": rows.last_loss,
        "tokens": rows.tokens,
        "tokens_per_second": speed,
        "tokens_per_second_per_gpu": None if speed is None else speed / rows.world_size,
        "step_seconds_median": median,
        **work,
        "loss_digest": rows.digest.value,
    }


def rank_totals(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combines the ranks' reports: the largest peak per tier, bytes per tier and category at the end and at the peak, bytes moved in all
    steps.

    Seconds per phase are from the rank that was busy longest, so that they add up. Bytes at the end have the keys
    `memory.{tier}.{category}_bytes`, bytes at the peak `peak_memory.{tier}.{category}_bytes`. Both are from the rank with the highest
    peak of the tier, so that they add up too.
    """
    totals: dict[str, Any] = {}
    for report in reports:
        categories = {
            f"memory.{tier}.{category}_bytes".replace(" ", "_"): nbytes
            for tier, held in report["memory"].items()
            for category, nbytes in held.items()
        }
        for key, value in (report["peak"] | categories | report["flows"]).items():
            totals[key] = max(value, totals.get(key, value))
    seconds = [
        {key: value for key, value in report["flows"].items() if key.startswith("seconds.")} for report in reports
    ]
    return totals | max(seconds, key=lambda phases: sum(phases.values())) | _at_peak(reports)


def _at_peak(reports: Sequence[dict[str, Any]]) -> dict[str, int]:
    found = {}
    for tier in reports[0]["memory"]:
        highest = max(reports, key=lambda report: report["peak"][f"peak_memory.{tier}_bytes"])
        for category, nbytes in highest["at_peak"][tier].items():
            found[f"peak_memory.{tier}.{category}_bytes".replace(" ", "_")] = nbytes
    return found
