"""Micro-batches whose losses weigh unequally: the router's losses weigh as the model's loss does."""

from dataclasses import replace

import pytest

from tests.parallel.topology.runs import CONFIG, Strategy, alone, arranged, batch, make_engine
from ztk.core.runtime import Process, Topology
from ztk.parallel.pipeline.layers import MicroBatch
from ztk.parallel.recompute import RecomputePolicy

RELATIVE = 1e-5  # see test_layouts.py
# Balance and z losses make up most of the gradient, so that a missing weight shows.
CONFIG_EXPERTS = replace(
    CONFIG,
    experts=4,
    experts_per_token=2,
    experts_every=2,
    expert_hidden_dim=24,
    balance_loss_weight=1.0,
    router_z_loss_weight=0.1,
)
ROWS = {"uneven": [(0, 3, 1.5), (3, 4, 0.5)], "one": [(0, 4, 2.0), (0, 1, 0.0)]}  # per replica: from, to, weight
STEPS = 4


def train(process: Process, *, topology: Topology, rows: str | None, stage: int = 0, **options) -> tuple:
    """Losses over all ranks, norms, mean balance. Without `rows` only this rank has the full batch. A pipeline's middle ranks get Nones."""
    placed = alone(process) if rows is None else arranged(process, topology=topology)
    mesh, micro_batches = placed.mesh, 2 if topology.pipeline > 1 else 1
    strategy = Strategy(topology=topology, stage=stage, options={"accumulation_steps": micro_batches, **options})
    engine = make_engine(placed, strategy=strategy, config=CONFIG_EXPERTS)
    start, stop, weight = (0, 4, 1.0) if rows is None else ROWS[rows][mesh.replica]
    is_middle = 0 < mesh.comm("pp").rank < mesh.comm("pp").size - 1
    losses, norms = [], []
    for step in range(STEPS):
        own = MicroBatch(args=tuple(full[start:stop] for full in batch(step)), weight=weight)
        loss = engine.train_batch([None if is_middle else own] * micro_batches)
        losses.append(float(engine.comm.gather_scalars(loss.detach().view(1), label="loss").mean()))
        norms.append(engine.read_metrics().grad_norm)
    module_metrics = engine.read_module_metrics()
    engine.close()
    return losses, norms, module_metrics["moe.balance_loss"]


@pytest.mark.parametrize("rows", list(ROWS))
@pytest.mark.parametrize(
    ("world", "topology", "options"),
    [
        (2, Topology(), {}),
        (2, Topology(expert=2), {"stage": 3, "recompute": RecomputePolicy(mode="full")}),
        (6, Topology(pipeline=3), {"stage": 1}),
    ],
    ids=["dp2", "ep2 recomputed", "pp3_dp2"],
)
def test_uneven_parts_train_like_one_rank(ranks, world, topology, options, rows):
    losses, norms, balance = ranks(1).run(train, topology=Topology(), rows=None)[0]
    for run in ranks(world).run(train, topology=topology, rows=rows, **options):
        assert run[0] == pytest.approx(losses, rel=RELATIVE)
        assert run[1] == pytest.approx(norms, rel=RELATIVE)
        assert run[2] == pytest.approx(balance, rel=RELATIVE)
