"""The tables at the end of a run, from every rank's counters."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ztk.report.gauges import COMM_KINDS, PHASES
from ztk.report.units import format_bytes, format_count

_CATEGORIES = ("parameters", "gradients", "optimizer", "gathered")
_MAX_RANKS = 8  # with more ranks, the table shows the maximum over ranks


def print_tables(
    console: Console, *, ranks: Sequence[dict[str, Any]], steps: int, kernels: Mapping[str, Mapping[str, float]]
) -> None:
    """Prints the tables.

    ranks: `Gauges.holdings` of every rank, and its "flows". steps: number of steps, for values per step. kernels: `KernelLog.means`.
    """
    console.print(memory_table(ranks))
    console.print(traffic_table(ranks, steps=steps))
    console.print(seconds_table(ranks))
    if kernels:
        console.print(kernel_table(kernels))


def memory_table(ranks: Sequence[dict[str, Any]]) -> Table:
    """Booked bytes per rank and tier, by category, and the peak."""
    present = {category for report in ranks for held in report["memory"].values() for category in held}
    categories = [c for c in _CATEGORIES if c in present] + sorted(present.difference(_CATEGORIES))
    headers = [category.replace(" ", "\n", 1) for category in categories]
    table = _table("memory per rank and tier", columns=("rank", "tier", *headers, "sum", "peak"), text_columns=2)
    for label, report in _shown(ranks):
        for tier, held in report["memory"].items():
            peak = report["peak"][f"peak_memory.{tier}_bytes"]
            if held or peak:
                cells = [format_bytes(held[c]) if c in held else "-" for c in categories]
                table.add_row(label, tier, *cells, format_bytes(sum(held.values())), format_bytes(peak))
        if allocator := report["peak"].get("peak_memory.allocator_bytes"):
            table.add_row(label, "allocator", *["-"] * len(categories), "-", format_bytes(allocator))
    return table


def traffic_table(ranks: Sequence[dict[str, Any]], *, steps: int) -> Table:
    """Bytes through network and disk: per step, in total, and the rate if the time is known."""
    table = _table("bytes per rank (largest)", columns=("", "per step", "total", "rate"), text_columns=1)
    largest = {key: max(report["flows"][key] for report in ranks) for key in ranks[0]["flows"]}
    for kind in COMM_KINDS:
        if nbytes := largest[f"comm.{kind}_bytes"]:
            table.add_row(kind, format_bytes(nbytes / max(1, steps)), format_bytes(nbytes), "")
    wire = sum(largest[f"comm.{kind}_bytes"] for kind in COMM_KINDS)
    table.add_row("wire, all", format_bytes(wire / max(1, steps)), format_bytes(wire), "")
    for way in ("read", "write"):
        if nbytes := largest[f"io.{way}_bytes"]:
            seconds = largest[f"io.{way}_seconds"]
            rate = f"{nbytes / seconds / 1e9:.2f} GB/s" if seconds else ""
            table.add_row(f"disk {way}", format_bytes(nbytes / max(1, steps)), format_bytes(nbytes), rate)
    return table


def seconds_table(ranks: Sequence[dict[str, Any]]) -> Table:
    """Seconds per phase of each rank."""
    table = _table("seconds per phase", columns=("rank", *PHASES, "sum"), text_columns=1)
    for label, report in _shown(ranks):
        seconds = [report["flows"][f"seconds.{phase}"] for phase in PHASES]
        table.add_row(label, *[f"{value:.2f}" for value in seconds], f"{sum(seconds):.2f}")
    return table


def kernel_table(kernels: Mapping[str, Mapping[str, float]]) -> Table:
    """Milliseconds, calls, rate and share of the floor of every op in a step, from the rank on which it took longest."""
    columns = ("kernel", "ms per step", "calls", "GB/s", "share of floor")
    table = _table("kernels (mean of the timed steps)", columns=columns, text_columns=1)
    for name, found in kernels.items():
        rate, share = found.get("gb_per_s"), found.get("share_of_floor")
        cells = (f"{found['ms']:.3f}", f"{found['calls']:g}", _cell(rate, ".2f"), _cell(share, ".1%"))
        table.add_row(name, *cells)
    return table


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def describe_end(summary: dict[str, Any]) -> str:
    """Summarises the run in one line: size, duration and result."""
    parts = [
        f"{summary['status']}: {summary['steps']} steps",
        f"loss {_loss(summary['first_loss'])} -> {_loss(summary['final_loss'])}",
        f"{format_count(summary['tokens_per_second'] or 0)} tokens/s",
        *(f"{name.upper()} {summary[name]:.1%}" for name in ("mfu", "hfu") if summary.get(name) is not None),
        f"{format_count(summary['parameters'])} parameters on {summary['world_size']} ranks",
        f"digest {summary['loss_digest'][:16]}",
    ]
    return ", ".join(parts)


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _shown(ranks: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for rank, report in enumerate(ranks[:_MAX_RANKS]):
        yield str(rank), report
    if len(ranks) > _MAX_RANKS:
        yield f"max of {len(ranks)}", _largest(ranks)


def _largest(reports: Sequence[Any]) -> Any:
    """Returns the maximum of every number in nested dictionaries. Ignores missing keys."""
    if not isinstance(reports[0], dict):
        return max(reports)
    keys = dict.fromkeys(key for report in reports for key in report)
    return {key: _largest([report[key] for report in reports if key in report]) for key in keys}


def _table(title: str, *, columns: Sequence[str], text_columns: int) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < text_columns else "right", no_wrap=True)
    return table
