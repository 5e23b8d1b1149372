"""Plans of steps with many micro-batches trace a few of them and count the others."""

import pytest

import ztk
from ztk.core.runtime.part import Part
from ztk.planner import trace

STEP = ("model=nano", "data=synthetic", "precision=bf16", "hardware=h100", "train.micro_batch_size=2")
NEAR = 2e-3  # of the seconds: at stage 3 the first gathers of a step delay its second micro-batch by 0.1 %
LATENCY = 5e-6  # operation_latency of conf/hardware/h100.yaml: each of the 6 skipped micro-batches may wait for one operation more
LAYOUTS = {
    "stage2": ("launch.ranks=16", "zero=stage2"),
    "stage3": ("launch.ranks=16", "zero=stage3"),
    "nvme": ("launch.ranks=4", "zero=stage3", "offload=nvme"),
    "1f1b": ("launch.ranks=16", "zero=stage2", "topology.pipeline=2", "topology.max_local_gradients=0"),
    "interleaved": (
        *("launch.ranks=16", "zero=stage1", "topology.pipeline=2", "topology.tensor=2"),
        *("topology.schedule=interleaved", "topology.virtual_stages=2"),
    ),
    "interleaved, between slow nodes": (  # a reduction delays the next backward of the last round, not of every round
        *("launch.ranks=16", "zero=stage1", "topology.pipeline=2", "topology.context=2", "hardware.ranks_per_node=1"),
        *("topology.schedule=interleaved", "topology.virtual_stages=2", "hardware.network_bandwidth=1e9"),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_counts_equal_a_complete_trace(layout, monkeypatch):
    words = (*STEP, *LAYOUTS[layout], "train.accumulation_steps=10")
    short = ztk.plan_run(*words).as_dict()
    monkeypatch.setattr(trace, "traced_micro_batches", lambda count, **_: count)
    complete = ztk.plan_run(*words).as_dict()
    assert short.keys() == complete.keys()
    near = max(NEAR, 6 * LATENCY / complete["step_seconds"]) if "interleaved" in layout else NEAR
    for key, value in complete.items():
        if key.startswith(("comm.", "io.", "memory.")) or key == "flops":
            assert short[key] == value, key
        elif isinstance(value, int | float) and not key.startswith("seconds.waiting"):
            assert short[key] == pytest.approx(value, rel=near), key


def test_the_peak_of_a_pipeline_does_not_grow_with_micro_batches_that_are_over():
    words = (*STEP, "launch.ranks=4", "zero=stage1", "topology.pipeline=2")
    few, many = (ztk.plan_run(*words, f"train.accumulation_steps={count}").peak_bytes["device"] for count in (6, 12))
    assert few == many


def test_a_plan_with_tensor_parallelism_computes_no_first_values(monkeypatch):
    monkeypatch.setattr(
        Part, "positions", lambda *_, **__: pytest.fail("positions of values that a plan does not have")
    )
    assert ztk.plan_run(*STEP, "launch.ranks=2", "topology.tensor=2").parameters
