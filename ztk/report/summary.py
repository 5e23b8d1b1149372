"""The metrics of `summary.json`."""

import statistics
from collections.abc import Sequence
from typing import Any

from ztk.report.gauges import Gauges
from ztk.report.rows import RowBuilder


def summarise(rows: RowBuilder) -> dict[str, Any]:
    """The metrics of the steps. `tokens_per_second` is that of the median step, so pauses and the first step's warm-up do not count."""
    made = max(1, rows.num_steps)
    median = statistics.median(rows.step_seconds) if rows.step_seconds else None
    return {
        "first_loss": rows.first_loss,
        "final_loss": rows.last_loss,
        "tokens": rows.tokens,
        "tokens_per_second": rows.num_tokens / made / median if median else None,
        "step_seconds_median": median,
        "loss_digest": rows.digest.value,
    }


def rank_report(rows: RowBuilder, *, gauges: Gauges) -> dict[str, Any]:
    """The counters that one rank sends to the others at the end."""
    return gauges.holdings() | {"flows": rows.flows}


def rank_totals(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Maxima over ranks: peak bytes per tier, bytes per tier and category at the end, bytes moved in all steps, seconds per phase.

    Bytes at the end have the keys `memory.{tier}.{category}_bytes`.
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
    return totals
