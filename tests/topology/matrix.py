"""The matrix of layouts, memory strategies and precisions: what a cell runs, and what it is held to."""

import hashlib
from dataclasses import dataclass, replace

import torch

from tests.topology.runs import BATCH, CONFIG, Strategy, alone, arranged, batch, make_engine
from ztk.runtime import Process, Topology

LAYOUTS = {
    "dp2": (2, Topology()),
    "tp2": (2, Topology(tensor=2)),
    "pp2": (2, Topology(pipeline=2)),
    "ep2": (2, Topology(expert=2)),
    "sp2": (2, Topology(sequence=2)),
    "tp2_pp2": (4, Topology(tensor=2, pipeline=2)),
    "tp2_dp2": (4, Topology(tensor=2)),
    "pp2_dp2": (4, Topology(pipeline=2)),
    "ep2_dp2": (4, Topology(expert=2)),
    "pp2_ep2": (4, Topology(pipeline=2, expert=2)),
    "tp2_ep2": (4, Topology(tensor=2, expert=2)),
    "tp2_sp2": (4, Topology(tensor=2, sequence=2)),
    "pp2_sp2": (4, Topology(pipeline=2, sequence=2)),
    "ep2_sp2": (4, Topology(expert=2, sequence=2)),
    "tp2_pp2_dp2": (8, Topology(tensor=2, pipeline=2)),
    "tp2_pp2_ep2": (8, Topology(tensor=2, pipeline=2, expert=2)),
    "tp2_pp2_sp2": (8, Topology(tensor=2, pipeline=2, sequence=2)),
}
STAGES, TIERS, PRECISIONS = (0, 1, 2, 3), ("none", "cpu", "nvme"), ("fp32", "bf16", "fp16")
MICRO_BATCHES = 2  # of a pipeline; elsewhere one, for which stages promise equal bits
# A sum split over ranks is rounded in another order, by a few units of 6e-8 a step, which 20 steps of training amplify.
RELATIVE_FP32 = 1e-5
# Experts are chosen per token, so a batch that is cut up chooses alike. The balance loss counts choices over all ranks that run a micro-batch
# at the same time and is then linear in each rank's part; the one-rank run it is compared with has the same micro-batches.
EXPERTS = replace(
    CONFIG, experts=4, experts_per_token=2, experts_every=2, expert_hidden_dim=24, balance_loss_weight=0.01
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """What one rank saw of one run. losses: of the whole batch."""

    losses: list[float]
    grad_norms: list[float]
    digest: str


def run_cell(
    process: Process, *, layout: str, stage: int, tier: str, dtype: str, seed: int = 3, steps: int = 20
) -> Cell:
    """One cell of the matrix, on this rank. seed: of the first weights."""
    _, topology = LAYOUTS[layout]
    strategy = Strategy(topology=topology, stage=stage, offload=tier, dtype=dtype, seed=seed)
    return _run(arranged(process, topology=topology), strategy=strategy, experts=topology.expert > 1, steps=steps)


def run_alone(process: Process, *, layout: str | None = None, dtype: str, seed: int = 3, steps: int = 20) -> Cell:
    """The one-rank run that cells are compared with. layout: has experts, and this run its micro-batches; None: no experts."""
    strategy = Strategy(dtype=dtype, seed=seed)
    if layout is None:
        return _run(alone(process), strategy=strategy, experts=False, steps=steps)
    return _run(alone(process), strategy=strategy, experts=True, steps=steps, cut=cut_of(layout))


def cut_of(layout: str) -> tuple[int, int]:
    """(replicas, micro-batches of each) that a step's batch is cut into."""
    world, topology = LAYOUTS[layout]
    replicas = world // (topology.tensor * topology.pipeline * topology.sequence)
    return replicas, MICRO_BATCHES if topology.pipeline > 1 else 1


def _run(
    process: Process, *, strategy: Strategy, experts: bool, steps: int, cut: tuple[int, int] | None = None
) -> Cell:
    """cut: into (replicas, micro-batches), whose parts this one rank has all; None: it has its own."""
    mesh = process.mesh
    replicas, micro_batches = cut or (mesh.replicas, MICRO_BATCHES if strategy.topology.pipeline > 1 else 1)
    # A scale at which no step is skipped: gradients are summed before they are divided, so a layout would skip others.
    strategy = replace(strategy, loss_scale=2.0**10, options={"accumulation_steps": micro_batches})
    engine = make_engine(process, strategy=strategy, config=EXPERTS if experts else CONFIG)
    losses, norms = [], []
    for step in range(steps):
        parts = [[part.chunk(micro_batches) for part in whole.chunk(replicas)] for whole in batch(step)]
        own = [[torch.cat(same) for same in zip(*part, strict=True)] if cut else part[mesh.replica] for part in parts]
        loss = engine.train_batch(list(zip(*own, strict=True)))
        losses.append(float(engine.comm.gather_scalars(loss.detach().double().view(1), label="loss").mean()))
        norms.append(engine.read_metrics().grad_norm)
    bits = hashlib.sha256(torch.tensor(losses, dtype=torch.float64).numpy().tobytes())
    for _, value in engine.zero.whole_parameters():
        bits.update(value.float().contiguous().numpy().tobytes())
    engine.close()
    return Cell(losses=losses, grad_norms=norms, digest=bits.hexdigest())


def deviation(cell: Cell, *, reference: Cell) -> float:
    """The largest relative difference of a step's loss."""
    return max(abs(a - b) / abs(b) for a, b in zip(cell.losses, reference.losses, strict=True))


assert BATCH % (2 * MICRO_BATCHES) == 0
