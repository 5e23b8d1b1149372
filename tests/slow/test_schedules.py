"""Every prompt has one digest over 200 random schedules of the inference engine, by the processor's products and by kernels.

A schedule draws the number of sequences that share the engine, the tokens of a step, the number of drafts, the arrival of each request, its
neighbours and the cancelled ones; together they decide whose prefix is reused. The cache is too small, so sequences are preempted.
tests/inference/test_exactness.py and test_blocks.py run some schedules, and show that wrong entries are noticed.
"""

import itertools
import random

import pytest

from tests.inference.models import build, build_decoder
from tests.inference.schedules import alone, run_schedule
from ztk.core.policies.inference import WEIGHTS
from ztk.kernels.shared.cached_attention import BLOCK

MODELS = ("native", "llama", "gemma3", "mixtral", "bloom")
LONGEST = 3  # blocks per sequence


@pytest.mark.parametrize("kernels", [False, True], ids=["products", "kernels"])
def test_schedules_change_no_bit(show, amount, kernels):
    """Prefixes are reused by every model and format, and some sequences of all of them are preempted."""
    policy: dict = {"kernels": kernels, "max_model_len": LONGEST * BLOCK}
    pairs = list(itertools.product(MODELS, WEIGHTS))
    count, preempted = -(-amount(200) // len(pairs)), 0
    for number, (name, weights) in enumerate(pairs):
        model = build_decoder() if name == "native" else build(name)
        policy["weights"] = weights
        expected, reused, cut = alone(model, **policy), 0, 0
        for seed in range(number * count, (number + 1) * count):
            room = {"cache_tokens": BLOCK * random.Random(seed).randint(LONGEST, 2 * LONGEST)}
            found, generator = run_schedule(model, seed=seed, **policy, **room)
            assert found == expected, f"{name}, {weights}, seed {seed}"
            reused += generator.reused_tokens
            cut += generator.preempted
        show(
            f"{name}, {weights}, {'kernels' if kernels else 'products'}: {count} schedules, {reused} tokens reused, {cut} preempted"
        )
        assert reused > 0, f"{name}, {weights}: no prefix was reused"
        preempted += cut
    assert preempted > 0
