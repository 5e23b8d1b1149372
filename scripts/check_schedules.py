"""Checks that every prompt has one digest over random schedules of the inference engine.

    python scripts/check_schedules.py                       200 schedules of the native decoder and of 4 families, in 3 formats
    python scripts/check_schedules.py --schedules 20 --models native --weights int4
    python scripts/check_schedules.py --cache blocks        the same over a cache of blocks that is too small: sequences are preempted

A schedule draws the number of sequences that share the engine, the tokens of a step, the number of drafts, the arrival of each request, its
neighbours and the cancelled ones; together they decide whose prefix is reused. Tokens and log-probabilities of every answer are digested to the
bit. Exit code 1 if an answer has more than one digest, if no prefix was reused, if no sequence was preempted (with blocks), or if a scrambled
cache entry, planted afterwards, changes no digest. CI runs some of the schedules: tests/inference/test_exactness.py.
"""

import argparse
import random
import sys
from pathlib import Path

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.inference.models import FAMILIES, build, build_decoder
from tests.inference.schedules import alone, run_schedule
from ztk.core.policies.inference import BLOCK_WEIGHTS, CACHES, WEIGHTS
from ztk.inference.attention import BLOCK
from ztk.inference.block_cache import BlockCache
from ztk.inference.slab_cache import SlabCache

MODELS = ("native", "llama", "gemma3", "mixtral", "bloom")
LONGEST = 3  # blocks per sequence
SCRAMBLED = 8  # limit of schedules until the planted fault must show


def check(model: nn.Module, *, weights: str, cache: str, seeds: range) -> tuple[int, int, int]:
    """Returns (answers whose digest differs, prompt tokens reused from other sequences, preempted sequences)."""
    policy = {"weights": weights}
    if cache == "blocks":
        policy |= {"cache": cache, "max_model_len": LONGEST * BLOCK}
    expected, differ, reused, preempted = alone(model, **policy), 0, 0, 0
    for seed in seeds:
        if cache == "blocks":
            policy["cache_tokens"] = BLOCK * random.Random(seed).randint(LONGEST, 2 * LONGEST)
        found, generator = run_schedule(model, seed=seed, **policy)
        differ += sum(own != one for own, one in zip(found, expected, strict=True))
        reused += generator.reused_tokens
        preempted += generator.preempted
    return differ, reused, preempted


def notices_a_scrambled_block(model: nn.Module) -> bool:
    """Plants one wrong number in each block that is copied on write."""
    policy = {"cache": "blocks", "max_model_len": LONGEST * BLOCK}
    expected, copy = alone(model, **policy), BlockCache.copy

    def scrambled(self: BlockCache, pairs: list[tuple[int, int]]) -> None:
        copy(self, pairs)
        self.keys(1)[pairs[0][1], 0, 2, 0] += 0.5

    BlockCache.copy = scrambled
    try:
        return any(run_schedule(model, seed=seed, **policy)[0] != expected for seed in range(SCRAMBLED))
    finally:
        BlockCache.copy = copy


def notices_a_scrambled_entry(model: nn.Module) -> bool:
    """Plants one wrong number in each copied prefix."""
    expected, copy = alone(model), SlabCache.copy

    def scrambled(self: SlabCache, source: int, *, target: int, positions: int) -> None:
        copy(self, source, target=target, positions=positions)
        self.keys[1][target, 0, 0, 2, 0] += 0.5

    SlabCache.copy = scrambled
    try:
        return any(run_schedule(model, seed=seed)[0] != expected for seed in range(SCRAMBLED))
    finally:
        SlabCache.copy = copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=200, help="number of schedules over all models and formats")
    parser.add_argument("--models", nargs="+", choices=("native", *FAMILIES), default=MODELS)
    parser.add_argument("--weights", nargs="+", choices=BLOCK_WEIGHTS, default=WEIGHTS)
    parser.add_argument("--cache", choices=CACHES, default="slabs")
    given = parser.parse_args()
    pairs = [(name, weights) for name in given.models for weights in given.weights]
    bad, first, total = False, 0, 0
    for place, (name, weights) in enumerate(pairs):
        count = given.schedules // len(pairs) + (place < given.schedules % len(pairs))
        model = build_decoder() if name == "native" else build(name)
        differ, reused, preempted = check(model, weights=weights, cache=given.cache, seeds=range(first, first + count))
        first, total = first + count, total + preempted
        bad = bad or differ > 0 or (count > 0 and reused == 0)
        print(
            f"{name}, weights={weights}: {count} schedules, {differ} answers differ, {reused} tokens reused, {preempted} preempted",
            flush=True,
        )
    bad = bad or (given.cache == "blocks" and total == 0)
    notices = (notices_a_scrambled_block if given.cache == "blocks" else notices_a_scrambled_entry)(build_decoder())
    print(f"a scrambled cache entry is {'noticed' if notices else 'NOT noticed'}")
    sys.exit(1 if bad or not notices else 0)


if __name__ == "__main__":
    main()
