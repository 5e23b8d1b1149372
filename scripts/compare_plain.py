"""Compares random scripts on a ztk engine with two ranks and in plain PyTorch: each must be equal or end in an error of ztk's.

    python scripts/compare_plain.py                             500 seeds
    python scripts/compare_plain.py --seeds 40 --first 1000     others
    python scripts/compare_plain.py --plant writes --seeds 100  plants a fault, which the comparison must find

Counts all scripts and the scripts that reached an edit of `tests/deepspeed/random_edits.py`. Exit code 1 if a script differs without an error
or ends in an error of torch's that plain PyTorch does not raise; with --plant, if no script differs.
"""

import argparse
import collections
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.deepspeed.random_plants import PLANTS
from tests.deepspeed.random_runs import Result, run_engine, script_of
from tests.ranks import RankFailed, RankPool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--plant", choices=tuple(PLANTS), default="")
    asked = parser.parse_args()
    pool, counts, of_edits = RankPool(2), collections.Counter(), collections.defaultdict(collections.Counter)
    for seed in range(asked.first, asked.first + asked.seeds):
        script = script_of(seed, plant=asked.plant)
        try:
            result = Result.of(pool.run(run_engine, seed=seed, plant=asked.plant))
        except RankFailed as failure:
            result = Result("failed", str(failure)[-700:], False)
        counts[result.kind] += 1
        if result.is_reached:
            of_edits[script.edit.kind][result.kind] += 1
        if result.kind in ("failed", "raw", "differs"):
            print(f"seed {seed}: {result.kind} {result.text}\n    {script}", flush=True)
        elif result.kind == "error":
            print(f"seed {seed}: {result.text:.110}", flush=True)
    pool.close()
    for kind, of_kind in sorted(of_edits.items()):
        print(f"    {kind}: {_listed(of_kind)}")
    print(_listed(counts))
    found = bool(counts["differs"])
    return int(not found) if asked.plant else int(found or bool(counts["failed"] + counts["raw"]))


def _listed(counts: collections.Counter) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common())


if __name__ == "__main__":
    sys.exit(main())
