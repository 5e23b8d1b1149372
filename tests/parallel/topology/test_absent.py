"""Micro-batches where sequences are cut in a pipeline: ranks in the middle may have none, and arguments may have names."""

import pytest
import torch

from tests.parallel.topology.runs import Outcome, Strategy, arranged, batch, make_engine, train_alone
from ztk.core.runtime import Process, Topology
from ztk.nn.staged import sequence_length
from ztk.parallel.pipeline.layers import MicroBatch
from ztk.parallel.tensor import TensorPolicy

RELATIVE = 1e-5  # see test_layouts.py
STEPS, MICRO_BATCHES = 4, 2
NORMS = TensorPolicy(sequence_parallel=True)
LAYOUTS = [
    (6, Topology(pipeline=3, tensor=2), {"tensor": NORMS}),
    (6, Topology(pipeline=3, sequence=2), {}),
]


@pytest.fixture(scope="module")
def reference(ranks) -> Outcome:
    return ranks(1).run(train_alone, strategy=Strategy(), steps=STEPS)[0]


def engine_and_batches(process: Process, *, topology: Topology, named: bool, **options):
    strategy = Strategy(topology=topology, options={"accumulation_steps": MICRO_BATCHES, **options})
    placed = arranged(process, topology=topology)
    pipeline = placed.mesh.comm("pp")

    def batches(step: int) -> list:
        if 0 < pipeline.rank < pipeline.size - 1:
            return [None] * MICRO_BATCHES
        own = zip(*(full.chunk(MICRO_BATCHES) for full in batch(step)), strict=True)
        return [{"targets": targets, "tokens": tokens} if named else (tokens, targets) for tokens, targets in own]

    return make_engine(placed, strategy=strategy), batches


def train(process: Process, **layout) -> tuple[list[float], list[float]]:
    engine, batches = engine_and_batches(process, **layout)
    losses, norms = [], []
    for step in range(STEPS):
        loss = engine.train_batch(batches(step))
        losses.append(float(engine.comm.gather_scalars(loss.detach().view(1), label="loss").mean()))
        norms.append(engine.read_metrics().grad_norm)
    engine.close()
    return losses, norms


@pytest.mark.parametrize("named", [False, True], ids=["placed", "named"])
@pytest.mark.parametrize(("world", "topology", "options"), LAYOUTS, ids=["tp2 sequence parallel", "sp2"])
def test_middle_ranks_need_no_micro_batches(ranks, reference, world, topology, options, named):
    for losses, norms in ranks(world).run(train, topology=topology, named=named, **options):
        assert losses == pytest.approx(reference.losses, rel=RELATIVE)
        assert norms == pytest.approx(reference.grad_norms, rel=RELATIVE)


def test_without_training_a_missing_micro_batch_is_refused():
    carry = torch.zeros(2, 8, 4)
    missing = MicroBatch.of(None)
    assert sequence_length(missing, carry=carry, parts=2) == 16
    with torch.no_grad(), pytest.raises(ValueError, match="this rank's micro-batch is None"):
        sequence_length(missing, carry=carry, parts=2)
