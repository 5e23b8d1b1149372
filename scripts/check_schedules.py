"""One digest per prompt over random schedules of the inference engine.

    python scripts/check_schedules.py                       200 schedules of the native decoder and of 4 families, in 3 formats
    python scripts/check_schedules.py --schedules 20 --models native --weights int4

A schedule draws how many sequences share the engine, how many tokens a step has, how many drafts are looked up, when each request comes, who
its neighbours are, which of them are cancelled, and so whose prefix is reused. Tokens and log-probabilities of every answer are digested to
the bit. Exit code 1 if an answer has more than one digest, if no prefix was reused, or if a scrambled cache entry, which is planted
afterwards, changes no digest. CI runs a few of the same schedules: tests/inference/test_exactness.py.
"""

import argparse
import sys
from pathlib import Path

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.inference.models import FAMILIES, build, build_decoder
from tests.inference.schedules import alone, run_schedule
from ztk.inference.cache import Cache
from ztk.policies.inference import WEIGHTS

MODELS = ("native", "llama", "gemma3", "mixtral", "bloom")
SCRAMBLED = 8  # schedules at most until the planted mistake must have shown


def check(model: nn.Module, *, weights: str, seeds: range) -> tuple[int, int]:
    """(answers whose digest differs, tokens of prompts that were another's)."""
    expected, differ, reused = alone(model, weights=weights), 0, 0
    for seed in seeds:
        found, tokens = run_schedule(model, seed=seed, weights=weights)
        differ += sum(own != one for own, one in zip(found, expected, strict=True))
        reused += tokens
    return differ, reused


def notices_a_scrambled_entry(model: nn.Module) -> bool:
    """A prefix that is copied gets one wrong number."""
    expected, copy = alone(model), Cache.copy

    def scrambled(self: Cache, source: int, *, target: int, positions: int) -> None:
        copy(self, source, target=target, positions=positions)
        self.keys[1][target, 0, 0, 2, 0] += 0.5

    Cache.copy = scrambled
    try:
        return any(run_schedule(model, seed=seed)[0] != expected for seed in range(SCRAMBLED))
    finally:
        Cache.copy = copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=200, help="over all models and formats together")
    parser.add_argument("--models", nargs="+", choices=("native", *FAMILIES), default=MODELS)
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=WEIGHTS)
    given = parser.parse_args()
    pairs = [(name, weights) for name in given.models for weights in given.weights]
    bad, first = False, 0
    for place, (name, weights) in enumerate(pairs):
        count = given.schedules // len(pairs) + (place < given.schedules % len(pairs))
        model = build_decoder() if name == "native" else build(name)
        differ, reused = check(model, weights=weights, seeds=range(first, first + count))
        first += count
        bad = bad or differ > 0 or (count > 0 and reused == 0)
        print(
            f"{name}, weights={weights}: {count} schedules, {differ} answers differ, {reused} tokens reused", flush=True
        )
    notices = notices_a_scrambled_entry(build_decoder())
    print(f"a scrambled cache entry is {'noticed' if notices else 'NOT noticed'}")
    sys.exit(1 if bad or not notices else 0)


if __name__ == "__main__":
    main()
