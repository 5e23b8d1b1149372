"""Scripts drawn at random, by an engine on two ranks and by plain PyTorch: each must be equal or end in an error.

    python scripts/compare_plain.py                             500 seeds
    python scripts/compare_plain.py --seeds 40 --first 1000     others
    python scripts/compare_plain.py --plant writes --seeds 100  with a fault planted: it must be found

Exit code 1 if a script differs without an error; with --plant, if none does.
"""

import argparse
import collections
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.deepspeed.random_scripts import PLANTS, Script, run_engine
from tests.ranks import RankFailed, RankPool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--plant", choices=tuple(PLANTS), default="")
    asked = parser.parse_args()
    pool, counts = RankPool(2), collections.Counter()
    for seed in range(asked.first, asked.first + asked.seeds):
        try:
            results = pool.run(run_engine, seed=seed, plant=asked.plant)
        except RankFailed as failure:
            results = [("failed", str(failure)[-700:])]
        kind, text = min(
            results, key=lambda result: ("failed", "differs", "error", "warning", "equal").index(result[0])
        )
        counts[kind] += 1
        if kind in ("failed", "differs"):
            print(f"seed {seed}: {kind} {text}\n    {Script.draw(seed)}", flush=True)
        elif kind == "error":
            print(f"seed {seed}: {text:.110}", flush=True)
    pool.close()
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    found = bool(counts["differs"])
    return int(not found) if asked.plant else int(found or bool(counts["failed"]))


if __name__ == "__main__":
    sys.exit(main())
