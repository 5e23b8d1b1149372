"""Every prompt has one digest over 200 random schedules of the inference engine, over slabs and over blocks.

A schedule draws the number of sequences that share the engine, the tokens of a step, the number of drafts, the arrival of each request, its
neighbours and the cancelled ones; together they decide whose prefix is reused. The cache of blocks is too small, so sequences are preempted.
tests/inference/test_exactness.py and test_blocks.py run some schedules, and show that wrong entries of both caches are noticed.
"""

import random

import pytest

from tests.inference.models import build, build_decoder
from tests.inference.schedules import alone, run_schedule
from ztk.core.policies.inference import CACHES, WEIGHTS
from ztk.inference.attention import BLOCK

MODELS = ("native", "llama", "gemma3", "mixtral", "bloom")
LONGEST = 3  # blocks per sequence


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", MODELS)
def test_schedules_change_no_bit(show, amount, name, weights, cache):
    model = build_decoder() if name == "native" else build(name)
    policy = {"weights": weights}
    if cache == "blocks":
        policy |= {"cache": cache, "max_model_len": LONGEST * BLOCK}
    expected, reused, preempted = alone(model, **policy), 0, 0
    first = 100 * (MODELS.index(name) * len(WEIGHTS) + WEIGHTS.index(weights))
    count = -(-amount(200) // (len(MODELS) * len(WEIGHTS)))
    for seed in range(first, first + count):
        if cache == "blocks":
            policy["cache_tokens"] = BLOCK * random.Random(seed).randint(LONGEST, 2 * LONGEST)
        found, generator = run_schedule(model, seed=seed, **policy)
        assert found == expected, seed
        reused += generator.reused_tokens
        preempted += generator.preempted
    show(f"{name}, {weights}, {cache}: {count} schedules, {reused} tokens reused, {preempted} preempted")
    assert reused > 0 and (preempted > 0 or cache == "slabs")
