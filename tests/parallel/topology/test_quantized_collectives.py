"""Fewer and shorter bytes at stage 3: exact where nothing is rounded, bounded where something is."""

import pytest
import torch
from torch import Tensor

from tests.parallel.topology.runs import Strategy, make_engine, train, train_step
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.runtime import Process, Topology


def test_second_shards_change_no_bit_and_leave_half_of_the_gathers_to_neighbours(ranks):
    plain = ranks(4).run(train, strategy=Strategy(stage=3), steps=6)
    near = Strategy(topology=Topology(intra_node=2), stage=3, zero={"hpz_partition_size": 2})
    seconds = ranks(4).run(train, strategy=near, steps=6)
    assert [outcome.digest for outcome in seconds] == [outcome.digest for outcome in plain]
    for outcome, before in zip(seconds, plain, strict=True):
        far, among = outcome.elements["data"]["all_gather"], outcome.elements["intra_node"]["all_gather"]
        assert far + among == before.elements["data"]["all_gather"]
        assert among > 0.4 * (far + among)  # the backward's gathers, except for parameters that it does not read


def _full_weights(
    process: Process, *, zero: dict, topology: Topology
) -> tuple[dict[str, Tensor], float, dict[str, int]]:
    """Weights as the ranks compute with them, the first gradient's norm, and bytes that a step moves between neighbourhoods."""
    arranged = process.arrange(topology)
    engine = make_engine(arranged, strategy=Strategy(stage=3, topology=topology, zero=zero))
    weights = {name: value.clone() for name, value in engine.zero.full_parameters()}
    arranged.mesh.counters.reset()
    train_step(engine, step=0)
    norm = engine.read_metrics().grad_norm
    moved = dict(arranged.mesh.comm("inter_node").counters.bytes)
    engine.close()
    return weights, norm, moved


def test_weights_are_sent_as_int8_with_half_a_step_of_error(ranks):
    exact, _, plain = ranks(4).run(_full_weights, zero={}, topology=Topology())[0]
    runs = ranks(4).run(_full_weights, zero={"quantized_weights": True}, topology=Topology())
    for weights, _, moved in runs:
        for name, value in weights.items():
            assert torch.equal(value, runs[0][0][name])  # all ranks compute with the same
            # groups are of 256 neighbours in the bucket, whose largest element may lie in another parameter
            largest = max(other.abs().max() for other in exact.values())
            assert (value - exact[name]).abs().max() <= largest / 254
        assert moved["all_gather"] < 0.4 * plain["all_gather"]  # 1.02 bytes instead of 4, and padding


@pytest.mark.parametrize("topology", [Topology(), Topology(intra_node=2)], ids=["one hop", "two hops"])
def test_gradients_are_sent_as_int4(ranks, topology):
    _, norm, plain = ranks(4).run(_full_weights, zero={}, topology=Topology())[0]
    for _, short, moved in ranks(4).run(_full_weights, zero={"quantized_gradients": True}, topology=topology):
        # Each element is off by at most a 14th of its group's largest, in the mean far less: the norm's error stays below that share.
        assert short == pytest.approx(norm, rel=1 / 14)
        assert moved.get("reduce_scatter", 0) == 0
        # 0.52 bytes instead of 4, and padding; with neighbourhoods of two, half of that leaves them
        assert moved["all_to_all"] < 0.2 / topology.intra_node * plain["reduce_scatter"]


def test_training_goes_on_with_all_three(ranks):
    exact = ranks(4).run(train, strategy=Strategy(stage=3), steps=20)[0]
    zero = {"quantized_weights": True, "quantized_gradients": True, "hpz_partition_size": 2}
    short = ranks(4).run(train, strategy=Strategy(topology=Topology(intra_node=2), stage=3, zero=zero), steps=20)
    assert len({outcome.digest for outcome in short}) == 1
    fall, fall_short = (outcome.losses[0] - min(outcome.losses) for outcome in (exact, short[0]))
    assert fall_short > 0.8 * fall


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"stage": 2, "quantized_weights": True}, "use zero=stage3"),
        ({"stage": 2, "quantized_nontrainable_weights": True}, "use zero=stage3"),
        ({"stage": 1, "quantized_gradients": True}, "use zero=stage2"),
        ({"stage": 2, "hpz_partition_size": 2}, "zero=stage3"),
        ({"stage": 3, "hpz_partition_size": 0}, "must be 1 or more"),
    ],
)
def test_what_has_no_effect_is_refused(options, fix):
    with pytest.raises(ValueError, match=fix):
        ZeroPolicy(**options)
