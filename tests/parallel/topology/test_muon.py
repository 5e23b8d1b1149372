"""Muon on tensor-parallel parts of a matrix: one rank's results, and the bytes of the exchange of the parts."""

from dataclasses import replace

import pytest

from tests.parallel.topology.runs import CONFIG, Outcome, Strategy, train, train_alone
from ztk.core.runtime import Topology
from ztk.optim import OptimizerPolicy
from ztk.parallel.tensor import TensorPolicy

# Orthogonalised in fp32: in bf16 a direction that differs in its last bit may round to the next number, 2^-8 away.
MUON = OptimizerPolicy(name="muon", lr=1e-2, adam_lr=3e-3, weight_decay=0.1, clip_grad_norm=0.8, ns_dtype="fp32")
ODD = replace(CONFIG, hidden_dim=41)  # the parts of the MLP's matrices are 20 and 21 wide
STEPS = 5
RELATIVE = 1e-5  # as in tests/zero/update/test_muon.py


@pytest.fixture(scope="module")
def reference(ranks) -> Outcome:
    return ranks(1).run(train_alone, strategy=Strategy(optimizer=MUON), steps=STEPS, config=ODD)[0]


@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        (2, Strategy(topology=Topology(tensor=2))),
        (4, Strategy(topology=Topology(tensor=2), stage=3, offload="cpu")),
        (4, Strategy(topology=Topology(tensor=2, sequence=2), stage=2)),
        (2, Strategy(topology=Topology(tensor=2), options={"tensor": TensorPolicy(sequence_parallel=True)})),
    ],
    ids=["tp2", "tp2 dp2 stage 3 cpu", "tp2 sp2 stage 2", "tp2 sequence parallel"],
)
def test_losses_equal_one_rank(ranks, reference, world, strategy):
    for outcome in ranks(world).run(train, strategy=replace(strategy, optimizer=MUON), steps=STEPS, config=ODD):
        assert outcome.losses == pytest.approx(reference.losses, rel=RELATIVE)
        assert outcome.grad_norms == pytest.approx(reference.grad_norms, rel=10 * RELATIVE)
    assert reference.losses[-1] < reference.losses[0]


def test_every_part_goes_to_the_rank_that_orthogonalises_it_and_back(ranks):
    """Bytes of both ranks: each element of the blocks' matrices is sent once in each direction per step."""
    strategy = Strategy(topology=Topology(tensor=2), optimizer=MUON)
    outcomes = ranks(2).run(train, strategy=strategy, steps=2)
    width, heads = CONFIG.dim, CONFIG.kv_heads * CONFIG.head_dim
    matrices = CONFIG.layers * (2 * width * width + 2 * width * heads + 3 * width * CONFIG.hidden_dim)
    assert sum(outcome.elements["tp"]["muon"] for outcome in outcomes) == 2 * 2 * matrices
