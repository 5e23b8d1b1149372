"""Every layout with every ZeRO stage, offload tier and precision computes what one rank computes; within a layout bits are equal.

    python scripts/check_layouts.py                                     all 612 cells on up to 8 ranks, about an hour on 2 cores
    python scripts/check_layouts.py --layouts tp2 pp2 --precisions fp32  a part of them

A cell is the largest relative difference of a loss over 20 steps to the one-rank run of the same model. fp32 is held to 1e-5.

A 16-bit cell is held to three times the error that the one-rank run has itself, which is its distance to the one-rank run in fp32: two runs
that are both as exact as that one differ by at most twice it, and the error is known from one run only.

One run tells that error badly where tokens choose experts: from weights that differ by 1e-4 of themselves it is 0.3 to 1.5 % in bf16. So a
16-bit layout is held to one rank's over 8 first weights, too: the geometric mean of its own errors, at its first stage and tier, is at most
twice that of one rank. A layout that is less exact, by summing in 16 bit what belongs in 32, shows here. Logarithms of the errors have a
standard deviation of about 0.4, the difference of two means of 8 thus one of 0.2, and log 2 is 3.5 times that: by chance 1 row in 4000.

Exit code 1 if a cell or a mean misses, or if the bits of a layout differ between stages or tiers.
"""

import argparse
import functools
import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.ranks import RankFailed, RankPool
from tests.topology.matrix import (
    LAYOUTS,
    PRECISIONS,
    RELATIVE_FP32,
    STAGES,
    TIERS,
    Cell,
    deviation,
    run_alone,
    run_cell,
)

# See the module's text.
SEEDS = range(3, 11)  # of first weights; the cells have the first
OWN_ERRORS = 3
LESS_EXACT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A layout in one precision. cells: one per strategy. error, own_error: means in 16 bit, of the layout and of one rank; None in fp32."""

    layout: str
    dtype: str
    bound: float
    cells: list[dict]
    error: float | None = None
    own_error: float | None = None

    @property
    def one_digest(self) -> bool:
        return len({tuple(cell["digests"]) for cell in self.cells}) == 1

    @property
    def as_exact(self) -> bool:
        """As one rank."""
        return self.error is None or self.error <= LESS_EXACT * self.own_error


def main() -> int:
    arguments = parse()
    console = Console(width=200)
    alone = RankPool(1)

    @functools.cache
    def one_rank(layout: str | None, dtype: str, seed: int) -> Cell:
        return alone.run(run_alone, layout=layout, dtype=dtype, seed=seed)[0]

    pools: dict[int, RankPool] = {}
    rows, columns = [], strategies(arguments)
    for layout in arguments.layouts:
        world, topology = LAYOUTS[layout]
        pool = pools.setdefault(world, RankPool(world))
        cut_alike = layout if topology.expert > 1 else None
        for dtype in arguments.precisions:
            seeds = SEEDS[:1] if dtype == "fp32" else SEEDS
            alike = [one_rank(cut_alike, dtype, seed) for seed in seeds]
            exact = [one_rank(cut_alike, "fp32", seed) for seed in seeds]
            rows.append(run_row(pool, layout=layout, dtype=dtype, columns=columns, alike=alike, exact=exact))
            console.print(line(rows[-1]))
    for pool in (alone, *pools.values()):
        pool.close()
    console.print(table(rows, columns=columns))
    cells = [cell for row in rows for cell in row.cells]
    for cell in cells:
        if cell["error"]:
            console.print(f"{cell['layout']} {cell['dtype']} stage {cell['stage']} {cell['tier']}: {cell['error']}")
    if arguments.json:
        Path(arguments.json).write_text("".join(json.dumps(cell) + "\n" for cell in cells))
    missed = sum(not cell["within"] for cell in cells)
    split, inexact = sum(not row.one_digest for row in rows), sum(not row.as_exact for row in rows)
    console.print(
        f"{len(cells)} cells, {missed} missed; of {len(rows)} rows {split} with more than one digest, {inexact} less exact"
    )
    return int(bool(missed or split or inexact))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--stages", nargs="+", type=int, choices=STAGES, default=list(STAGES))
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=list(TIERS))
    parser.add_argument("--json", help="also write one line per cell to this file")
    return parser.parse_args()


def strategies(arguments: argparse.Namespace) -> list[tuple[int, str]]:
    return [(stage, tier) for stage in arguments.stages for tier in arguments.tiers]


def run_row(
    pool: RankPool, *, layout: str, dtype: str, columns: list[tuple[int, str]], alike: list[Cell], exact: list[Cell]
) -> Row:
    """alike, exact: the one-rank runs in this precision and in fp32, one per seed."""
    cells = [run(pool, layout=layout, dtype=dtype, stage=s, tier=t, reference=alike[0]) for s, t in columns]
    bound, error, own_error = RELATIVE_FP32, None, None
    if dtype != "fp32":
        own = [deviation(cell, reference=reference) for cell, reference in zip(alike, exact, strict=True)]
        bound, own_error = OWN_ERRORS * own[0], statistics.geometric_mean(own)
        error = (
            math.inf
            if any(cell["error"] for cell in cells)
            else statistics.geometric_mean(errors(pool, layout=layout, dtype=dtype, strategy=columns[0], exact=exact))
        )
    for cell in cells:
        cell |= {"bound": bound, "within": cell["error"] is None and cell["deviation"] <= bound}
    return Row(layout=layout, dtype=dtype, bound=bound, cells=cells, error=error, own_error=own_error)


def run(pool: RankPool, *, layout: str, dtype: str, stage: int, tier: str, reference: Cell) -> dict:
    cell = {"layout": layout, "dtype": dtype, "stage": stage, "tier": tier, "error": None, "deviation": None}
    try:
        outcomes = pool.run(run_cell, layout=layout, stage=stage, tier=tier, dtype=dtype, seed=SEEDS[0])
    except RankFailed as failure:
        return cell | {"error": str(failure).strip().splitlines()[-1], "digests": []}
    worst = max(deviation(outcome, reference=reference) for outcome in outcomes)
    return cell | {"deviation": worst, "digests": [outcome.digest for outcome in outcomes]}


def errors(pool: RankPool, *, layout: str, dtype: str, strategy: tuple[int, str], exact: list[Cell]) -> list[float]:
    """The layout's distance to one rank in fp32, for each seed."""
    (stage, tier), found = strategy, []
    for seed, reference in zip(SEEDS, exact, strict=True):
        outcomes = pool.run(run_cell, layout=layout, stage=stage, tier=tier, dtype=dtype, seed=seed)
        found.append(max(deviation(outcome, reference=reference) for outcome in outcomes))
    return found


def shown(cell: dict) -> str:
    if cell["error"]:
        return "failed"
    return f"{cell['deviation']:.0e}" + ("" if cell["within"] else " MISS")


def line(row: Row) -> str:
    worst = max((cell["deviation"] for cell in row.cells if cell["deviation"] is not None), default=float("nan"))
    failed = sum(cell["error"] is not None for cell in row.cells)
    means = f", error {row.error:.1e} beside {row.own_error:.1e} of one rank" if row.error is not None else ""
    bits = "one digest" if row.one_digest else "DIGESTS DIFFER"
    return f"{row.layout:12} {row.dtype}: at most {worst:.1e} of {row.bound:.1e}{means}, {bits}, {failed} failed"


def table(rows: list[Row], *, columns: list[tuple[int, str]]) -> Table:
    made = Table(title="largest relative difference of a loss to one rank, 20 steps")
    strategies = [f"{stage} {tier}" for stage, tier in columns]
    for title in ("layout", "precision", "bound", *strategies, "error / one rank's", "bits"):
        made.add_column(title)
    for row in rows:
        ratio = f"{row.error / row.own_error:.2f}{'' if row.as_exact else ' MISS'}" if row.error is not None else ""
        bits = "equal" if row.one_digest else "DIFFER"
        made.add_row(row.layout, row.dtype, f"{row.bound:.0e}", *map(shown, row.cells), ratio, bits)
    return made


if __name__ == "__main__":
    sys.exit(main())
