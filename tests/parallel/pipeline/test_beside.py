"""Pipelines combined with the other axes train like one rank. Tolerance as in test_engine.py.

Adam's first steps carry a rounding into the weights, and experts carry it on: their norms differ by 1e-7, 2e-6 and 1e-5 in three steps where
sums are taken in another order. Two steps show an update.
"""

from dataclasses import replace

import pytest
import torch

from tests.parallel.pipeline.models import DECODER, Layout, build_engine, decoder, micro_batches
from ztk.core.runtime import Topology
from ztk.parallel.tensor import TensorPolicy

STEPS = 2
MOE = {"experts": 4, "experts_per_token": 2, "experts_every": 1, "expert_hidden_dim": 24}


def train(process, *, layout: Layout, norms: bool = False, experts: bool = False) -> tuple[list[float], list[float]]:
    """Losses of this rank's replica, gradient norms."""
    config = replace(DECODER, tie_embeddings=layout.tied, **(MOE if experts else {}))
    model, more = decoder(config)
    engine = build_engine(process, layout=layout, model=model, tensor=TensorPolicy(sequence_parallel=norms), **more)
    mesh = engine.process.mesh
    losses, norms = [], []
    for step in range(STEPS):
        batches = micro_batches(step, replica=mesh.replica, replicas=mesh.replicas)
        losses.append(float(engine.train_batch(batches)))
        norms.append(engine.read_metrics().grad_norm)
    engine.close()
    if layout.topology != Topology():
        mesh.close()
    return losses, norms


def check(runs: list, *, expected: list) -> None:
    for part, relative in ((0, 1e-5), (1, 2e-5)):
        mean = torch.tensor([run[part] for run in runs]).mean(0)
        wanted = torch.tensor([run[part] for run in expected]).mean(0)
        torch.testing.assert_close(mean, wanted, rtol=relative, atol=0)


@pytest.mark.parametrize(
    ("layout", "norms"),
    [
        (Layout(topology=Topology(pipeline=2, tensor=2), stage=0, tied=True), False),
        (Layout(topology=Topology(pipeline=2, tensor=2), stage=3, schedule="zero_bubble"), True),
        (
            Layout(topology=Topology(pipeline=2, sequence=2), stage=3, schedule="interleaved", virtual_stages=2),
            False,
        ),
    ],
    ids=["tp2", "tp2-norms-zero_bubble", "sp2-interleaved"],
)
def test_layers_and_sequences_may_be_cut_too(ranks, layout, norms):
    expected = ranks(1).run(train, layout=Layout(tied=layout.tied))
    check(ranks(4).run(train, layout=layout, norms=norms), expected=expected)


@pytest.mark.parametrize("stage", [0, 3])
def test_experts_may_be_spread_too(ranks, stage):
    """Compared with two replicas without either: experts are balanced over the replicas' batches together, which one rank does not have."""
    expected = ranks(2).run(train, layout=Layout(), experts=True)
    layout = Layout(topology=Topology(pipeline=2, expert=2), stage=stage)
    check(ranks(4).run(train, layout=layout, experts=True), expected=expected)
