"""Seconds of a rollout next to numbers that are computed by hand."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ztk.config import Machine, compose, hardware_values
from ztk.core.policies.hardware import Hardware
from ztk.experiments.plan import make_plan, rollout_of
from ztk.planner import RolloutWork, plan_rollout

# 1e12 operations and 1e11 bytes per second of memory, half of each reached; 1e9 bytes per second between nodes.
HARDWARE = replace(
    Hardware(**hardware_values("h100")),
    bf16_rate=2e12,
    product_share=0.5,
    memory_bandwidth=2e11,
    memory_share=0.5,
    network_bandwidth=1e9,
)
# A step of 1,000 tokens takes 2 s, and 6e12 operations.
MADE: Any = SimpleNamespace(
    parameters=1_000_000_000,
    world_size=4,
    tokens=1000,
    model_flops=6e12,
    hardware=HARDWARE,
    time=SimpleNamespace(seconds=2.0),
)
WORK = RolloutWork(
    answers=100, prompt_tokens=10, answer_tokens=20, scoring_models=2, cache_bytes=1_000_000, sequences=50
)


def test_seconds_are_those_computed_by_hand():
    found = plan_rollout(MADE, work=WORK, servers=2, devices=1, hardware=HARDWARE, weight_bytes=2)
    # 2e9 bytes of weights and 50 x 20 tokens x 1e6 bytes at 1e11 bytes/s: 0.03 s. Products, 2 x 1e9 x 50 at 1e12/s, take 0.1 s.
    # 40 steps: 4 s. The prompts, 2 x 1e9 x 1,000 tokens: 2 s.
    assert found.draws_alone == pytest.approx(6.0) and found.draws == pytest.approx(3.0)
    # 3,000 tokens: a forward of a step is 2e12, so 6e12 operations for each of two models, on 4 devices.
    assert found.scores == pytest.approx(3.0)
    assert found.updates == pytest.approx(6.0)
    assert found.sends == pytest.approx(4.0)  # 2e9 bytes to each of two servers
    assert found.in_turns == pytest.approx(16.0) and found.overlapped == pytest.approx(9.0)
    assert found.needed == 1 and found.in_time == 1 and len(list(found.lines())) == 3


def test_memory_limits_few_sequences_and_devices_divide_a_server():
    few = replace(WORK, sequences=5, answers=10)
    one = plan_rollout(MADE, work=few, servers=1, devices=1, hardware=HARDWARE, weight_bytes=2)
    # (2e9 + 5 x 20 x 1e6) bytes at 1e11/s: 0.021 s for each of 40 steps; prompts 0.2 s.
    assert one.draws == pytest.approx(1.04)
    two = plan_rollout(MADE, work=few, servers=1, devices=2, hardware=HARDWARE, weight_bytes=2)
    assert two.draws == pytest.approx(0.52)
    slow = replace(HARDWARE, memory_bandwidth=2e9)
    needy = plan_rollout(MADE, work=few, servers=4, devices=1, hardware=slow, weight_bytes=2)
    # 2.1 s for each of 40 steps and 0.2 s, next to 0.3 s of scores and 0.6 s of updates.
    assert needy.draws_alone == pytest.approx(84.2) and needy.needed == 94
    assert needy.in_time == pytest.approx(0.9 * 4 / 84.2) and "rollout.late=cut: 4% of" in list(needy.lines())[-1]


def test_hardware_without_a_network_is_refused():
    with pytest.raises(ValueError, match="network_bandwidth=null"):
        plan_rollout(
            MADE, work=WORK, servers=1, devices=1, hardware=replace(HARDWARE, network_bandwidth=None), weight_bytes=2
        )


def test_the_task_plans_rollouts_with_other_servers(tmp_path):
    words = ("task=plan", "model=nano", "hardware=h100", "launch.ranks=2", "plan.answers=64", "plan.prompt_tokens=28")
    config = compose(
        *words,
        "plan.servers=3",
        "plan.server_hardware=a100_80",
        output_dir=str(tmp_path),
        machine=Machine(gpus=0, cores=2),
    )
    made = make_plan(config)
    found = rollout_of(config, made=made)
    assert found is not None and found.servers == 3 and found.draws > 0
    assert found.updates == pytest.approx(made.time.seconds * 64 * config.data.seq_len / made.tokens)
    weights = made.parameters * 2 * 3
    slowest = min(made.hardware.network_bandwidth, Hardware(**hardware_values("a100_80")).network_bandwidth)
    assert found.sends == pytest.approx(weights / slowest)
    assert set(found.row()) >= {"rollout.draw_seconds", "rollout.servers_needed", "rollout.in_time"}
