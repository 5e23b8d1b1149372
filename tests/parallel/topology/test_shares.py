"""Model state per rank: elements, divided by the degrees."""

from dataclasses import replace

import pytest

from tests.parallel.topology.runs import CONFIG, Strategy, train
from ztk.core.runtime import Topology

NORMS = (2 * CONFIG.layers + 1) * CONFIG.dim  # every tensor rank has a copy
EXPERTS = replace(CONFIG, experts=4, experts_every=2, expert_hidden_dim=24)
BYTES = 8  # fp32 moments; the parameter is its own master


@pytest.mark.parametrize(
    ("world", "topology"),
    [
        (4, Topology()),
        (4, Topology(tensor=2)),
        (4, Topology(pipeline=2)),
        (8, Topology(tensor=2, pipeline=2)),
        (4, Topology(tensor=2, pipeline=2)),
        (4, Topology(sequence=2)),
    ],
    ids=["dp4", "tp2_dp2", "pp2_dp2", "tp2_pp2_dp2", "tp2_pp2", "sp2_dp2"],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_each_element_of_state_is_on_one_rank(ranks, world, topology, stage):
    options = {"accumulation_steps": 2} if topology.pipeline > 1 else {}
    outcomes = ranks(world).run(train, strategy=Strategy(topology=topology, stage=stage, options=options), steps=1)
    parameters = CONFIG.parameter_count()
    assert sum(outcome.owned for outcome in outcomes) == parameters + (topology.tensor - 1) * NORMS
    for outcome in outcomes:
        assert outcome.parameters == parameters
        assert outcome.state_bytes == BYTES * outcome.padded
    if topology.pipeline == 1:  # stages are as even as layers can be shared out, the other axes are even to the padding
        share = (parameters + (topology.tensor - 1) * NORMS) / world
        assert (
            max(outcome.padded for outcome in outcomes) < 1.35 * share
        )  # 128 elements a bucket, in a model this small


def test_experts_are_divided_by_their_own_axes(ranks):
    total = EXPERTS.parameter_count()
    for topology in (Topology(), Topology(expert=2), Topology(expert=4)):
        outcomes = ranks(4).run(train, strategy=Strategy(topology=topology, stage=3), config=EXPERTS, steps=1)
        assert sum(outcome.owned for outcome in outcomes) == total
