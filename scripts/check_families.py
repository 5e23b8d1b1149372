"""Families of transformers beside strategies: every cell trains as plain transformers and torch's AdamW on one rank, or is refused.

    python scripts/check_families.py                                    all 200 cells on two ranks, about 6 minutes on 2 cores
    python scripts/check_families.py --families Llama GPT2 --columns tp2 pp2

A cell is the largest relative difference of a loss over four steps in fp32; with LoRA the one rank is peft's. The bound is 1e-5. A refusal
comes with the configuration, before ranks start, and names what to write instead; its text stands below the table. The table is in
docs/hf_models.md. Exit code 1 if a cell misses its bound, fails, or is refused too late.
"""

import argparse
import logging
import re
import sys
import tempfile
import time
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.hf.cells import COLUMNS, RANKS, Result, run_cell
from tests.parallel.topology.families import FAMILIES
from tests.ranks import RankFailed, RankPool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="NAME")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS), metavar="NAME")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("ztk.hf.causal").setLevel(logging.ERROR)  # its line of what model.kernels replaced
    start, pool = time.perf_counter(), RankPool(RANKS)
    refusals: dict[str, int] = {}  # text to its number
    faults: list[str] = []
    print("| | " + " | ".join(options.columns) + " |\n| --- |" + " --- |" * len(options.columns))
    try:
        for family in options.families:
            cells = [
                _cell(pool, family=family, column=name, refusals=refusals, faults=faults) for name in options.columns
            ]
            print(f"| {family} | " + " | ".join(cells) + " |", flush=True)
    finally:
        pool.close()
    print(*(f"\n{number}. {text}" for text, number in refusals.items()), sep="")
    print(*(f"\nfault: {fault}" for fault in faults), sep="")
    count = len(options.families) * len(options.columns)
    print(f"\n{count} cells, {len(faults)} faults, {time.perf_counter() - start:.0f} s")
    return 1 if faults else 0


def _cell(pool: RankPool, *, family: str, column: str, refusals: dict[str, int], faults: list[str]) -> str:
    """The cell's words. A fault and a new refusal are added to their lists."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = run_cell(pool, family=family, column=column, folder=Path(folder))
        except (RankFailed, ValueError) as error:
            faults.append(f"{family} {column}: {str(error).strip().splitlines()[-1]}")
            return "**fails**"
        text = re.sub(r"of type \w+", "of type TYPE", found.refusal.replace(folder, "FOLDER"))
    if not found.holds:
        faults.append(f"{family} {column}: {found}")
    return _words(found) if found.deviation is not None else f"refused ({refusals.setdefault(text, len(refusals) + 1)})"


def _words(found: Result) -> str:
    words = f"{found.deviation:.0e}"
    return words if found.holds else f"**{words}**"


if __name__ == "__main__":
    sys.exit(main())
