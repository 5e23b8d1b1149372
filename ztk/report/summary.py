"""The counters of all ranks in `summary.json`."""

from collections.abc import Sequence
from typing import Any


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
