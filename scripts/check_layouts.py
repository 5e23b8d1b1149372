"""Every layout with every ZeRO stage, offload tier and precision computes what one rank computes; within a layout bits are equal.

    python scripts/check_layouts.py                                     all 612 cells on up to 8 ranks, about 45 minutes on 2 cores
    python scripts/check_layouts.py --layouts tp2 pp2 --precisions fp32  a part of them

A cell is the largest relative difference of a loss over 20 steps to the one-rank run of the same model. fp32 is held to 1e-5. A 16-bit cell is
held to three times the error that the one-rank run has itself, which is its distance to the one-rank run in fp32: two runs that are both
as exact as that one differ by at most twice it, and the error is known from one run only. Exit code 1 if a cell misses, or if the bits of
a layout differ between stages or tiers.
"""

import argparse
import functools
import json
import sys
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

OWN_ERRORS = 3  # see the module's text


def main() -> int:
    arguments = parse()
    console = Console(width=200)
    alone = RankPool(1)

    @functools.cache
    def one_rank(layout: str | None, dtype: str) -> Cell:
        return alone.run(run_alone, layout=layout, dtype=dtype)[0]

    pools: dict[int, RankPool] = {}
    rows, cells, columns = [], [], strategies(arguments)
    for layout in arguments.layouts:
        world, topology = LAYOUTS[layout]
        pool = pools.setdefault(world, RankPool(world))
        for dtype in arguments.precisions:
            cut_alike = layout if topology.expert > 1 else None
            exact, reference = (one_rank(cut_alike, name) for name in ("fp32", dtype))
            bound = RELATIVE_FP32 if dtype == "fp32" else OWN_ERRORS * deviation(reference, reference=exact)
            row = [run(pool, layout=layout, dtype=dtype, stage=s, tier=t, reference=reference) for s, t in columns]
            for cell in row:
                cell |= {"bound": bound, "within": cell["error"] is None and cell["deviation"] <= bound}
            cells += row
            rows.append((layout, dtype, bound, row))
            console.print(line(layout, dtype=dtype, bound=bound, row=row))
    for pool in (alone, *pools.values()):
        pool.close()
    console.print(table(rows, columns=columns))
    for cell in cells:
        if cell["error"]:
            console.print(f"{cell['layout']} {cell['dtype']} stage {cell['stage']} {cell['tier']}: {cell['error']}")
    if arguments.json:
        Path(arguments.json).write_text("".join(json.dumps(cell) + "\n" for cell in cells))
    missed = sum(not cell["within"] for cell in cells)
    split = sum(not one_digest(row) for *_, row in rows)
    console.print(f"{len(cells)} cells, {missed} missed, {split} of {len(rows)} rows with more than one digest")
    return int(bool(missed or split))


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


def run(pool: RankPool, *, layout: str, dtype: str, stage: int, tier: str, reference) -> dict:
    cell = {"layout": layout, "dtype": dtype, "stage": stage, "tier": tier, "error": None, "deviation": None}
    try:
        outcomes = pool.run(run_cell, layout=layout, stage=stage, tier=tier, dtype=dtype)
    except RankFailed as failure:
        return cell | {"error": str(failure).strip().splitlines()[-1], "digests": []}
    worst = max(deviation(outcome, reference=reference) for outcome in outcomes)
    return cell | {"deviation": worst, "digests": [outcome.digest for outcome in outcomes]}


def one_digest(row: list[dict]) -> bool:
    return len({tuple(cell["digests"]) for cell in row}) == 1


def shown(cell: dict) -> str:
    if cell["error"]:
        return "failed"
    return f"{cell['deviation']:.0e}" + ("" if cell["within"] else " MISS")


def line(layout: str, *, dtype: str, bound: float, row: list[dict]) -> str:
    worst = max((cell["deviation"] for cell in row if cell["deviation"] is not None), default=float("nan"))
    bits = "one digest" if one_digest(row) else "DIGESTS DIFFER"
    failed = sum(cell["error"] is not None for cell in row)
    return f"{layout:12} {dtype}: at most {worst:.1e} of {bound:.1e}, {bits}, {failed} failed"


def table(rows: list[tuple], *, columns: list[tuple[int, str]]) -> Table:
    made = Table(title="largest relative difference of a loss to one rank, 20 steps")
    for title in ("layout", "precision", "bound", *(f"{stage} {tier}" for stage, tier in columns), "bits"):
        made.add_column(title)
    for layout, dtype, bound, row in rows:
        made.add_row(layout, dtype, f"{bound:.0e}", *map(shown, row), "equal" if one_digest(row) else "DIFFER")
    return made


if __name__ == "__main__":
    sys.exit(main())
