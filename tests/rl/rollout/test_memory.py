"""Bytes of a rollout at stage 3 by tier, counted by the ledgers of two ranks and compared with the formula.

P: bytes of the full parameters, U: of the largest unit, R: of the root, which is open during every forward.
"""

import pytest
import torch

from tests.rl.rollout.runs import composed
from ztk.core.runtime import Process
from ztk.core.runtime.memory import Tier
from ztk.experiments import policies
from ztk.experiments.models import build
from ztk.rl.rollout import (
    Requests,
    RolloutPolicy,
    RolloutWeights,
    TrainerRollouts,
    generate,
    settle_weights,
    states_away,
)

LENGTH, PROMPTS = 12, 4


def rolled_out(process: Process, *, config, weights: RolloutWeights) -> dict:
    """Bytes by tier before the rollout and at most until after it, by category, and the sizes in bytes of the units, the root last."""
    engine = build(config, process=process.arrange(policies.topology(config)))
    before = {tier.label: engine.memory.by_category(tier) for tier in Tier}
    numbers = torch.arange(PROMPTS)
    requests = Requests(
        prompts=[[97 + row, 98] for row in range(PROMPTS)], numbers=numbers, prompt_numbers=numbers, copies=numbers * 0
    )
    options = {"length": LENGTH, "micro_batch": PROMPTS, "max_tokens": 6, "stops": (10,), "pad": 0}
    policy = RolloutPolicy(**options, weights=weights)
    generate(TrainerRollouts(engine), policy=policy, requests=requests, step=0)
    units = [
        sum(bucket.size * bucket.traits.dtype.itemsize for bucket in unit.buckets)
        for unit in engine.zero.gathering.units
    ]
    found = {
        "before": before,
        "most": {tier.label: engine.memory.by_category_at_peak(tier) for tier in Tier},
        "units": units,
        "parameters": engine.num_parameters,
    }
    engine.close()
    return found


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("weights", [RolloutWeights.whole, RolloutWeights.streamed])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_rollouts_memory_equals_the_formula(ranks, offload, weights, dtype):
    """Equal to the byte, with each bucket padded as it is stored. Stored states stay in place on every tier."""
    options = ("zero=stage3", f"offload={offload}", f"precision={dtype}", "zero.prefetch_bucket_size=0")
    config = composed("grpo", *options, f"rollout.weights={weights.value}", "model.layers=4", ranks=2)
    for found in ranks(2).run(rolled_out, config=config, weights=weights):
        *blocks, root = found["units"]
        full, width = sum(found["units"]), 4 if dtype == "fp32" else 2
        assert found["parameters"] * width <= full < 1.03 * found["parameters"] * width
        assert max(blocks) + root < full / 2
        expected = full if weights is RolloutWeights.whole else max(blocks) + root
        assert found["most"]["device"].pop("gathered") == expected
        assert found["most"] == found["before"]
        stored = found["before"]["device" if offload == "none" else "host"]
        assert stored["optimizer"] == full // width // 2 * (8 if dtype == "fp32" else 12)  # half on each rank
        assert stored["parameters"] == full // 2


def test_gathered_once_takes_no_more_than_the_limit(ranks):
    """zero.max_live_parameters, elements: units without room next to two of the largest units are gathered for every forward."""
    options = ("zero=stage3", "zero.prefetch_bucket_size=0", "zero.max_live_parameters=30000", "model.layers=4")
    found = ranks(2).run(rolled_out, config=composed("grpo", *options, ranks=2), weights=RolloutWeights.whole)[0]
    *blocks, root = found["units"]
    gathered = found["most"]["device"]["gathered"]
    assert max(blocks) + root < gathered <= 30_000 * 4 < sum(found["units"])


def settled(process: Process, *, config, free_bytes: int) -> tuple[str, str]:
    engine = build(config, process=process.arrange(policies.topology(config)))
    found = settle_weights(engine, free_bytes=free_bytes + process.rank)  # the smallest counts
    engine.close()
    return found.weights.value, found.reason


@pytest.mark.parametrize(
    ("limit", "free_bytes", "expected", "reason"),
    [
        (10**9, 1 << 30, "whole", "1,024 MiB are free on every rank"),
        (10**9, 1 << 14, "streamed", "0 MiB are free on a rank"),
        (9_000, 1 << 30, "streamed", "more than zero.max_live_parameters=9,000"),
    ],
)
def test_auto_follows_the_sizes_and_gives_a_reason(ranks, limit, free_bytes, expected, reason):
    config = composed("grpo", "zero=stage3", f"zero.max_live_parameters={limit}", ranks=2)
    for weights, said in ranks(2).run(settled, config=config, free_bytes=free_bytes):
        assert weights == expected and reason in said


def away(process: Process, *, config) -> list[dict[str, dict[str, int]]]:
    """Bytes by tier and category before, while and after the states are away."""
    engine, found = build(config, process=process.arrange(policies.topology(config))), []

    def look() -> None:
        found.append({tier.label: engine.memory.by_category(tier) for tier in Tier})

    look()
    with states_away(engine):
        look()
    look()
    engine.close()
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_optimizer_states_leave_the_device_meanwhile(ranks, dtype):
    config = composed("grpo", "zero=stage2", f"precision={dtype}", ranks=2)
    for before, during, after in ranks(2).run(away, config=config):
        assert before == after and before["device"]["optimizer"] > 0
        assert during["host"]["optimizer"] == before["device"]["optimizer"] and not during["device"].get("optimizer", 0)
