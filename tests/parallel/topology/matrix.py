"""The matrix of layouts, memory strategies and precisions: the run of a cell, and its bounds."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tests.checkpoint.runs import canonical
from tests.parallel.topology.runs import BATCH, CONFIG, LENGTH, Strategy, alone, arranged, batch, make_engine
from tests.ranks import RankPool
from ztk.checkpoint import load, save
from ztk.core.runtime import Process, Topology
from ztk.train.engine import Engine

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
    "cp2": (2, Topology(context=2)),
}
STAGES, TIERS, PRECISIONS = (0, 1, 2, 3), ("none", "cpu", "nvme"), ("fp32", "bf16", "fp16")
BETA = 0.9  # of AdamW's first moment
ALIKE = 0.25  # of a walk's steps at least; wrong routing would leave none, of 128 choices a step
TOKENS = BATCH * LENGTH  # of a step
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
    """The results of one rank in one run. losses: of the full batch."""

    losses: list[float]
    grad_norms: list[float]
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """Steps that each began in a state of another run. losses: of the full batch; loads: of each layer's experts; gradients [elements of
    the model], as the optimizer saw them, clipped. On rank 0; elsewhere gradients are None."""

    losses: list[float]
    loads: list[dict[str, list[float]] | None]
    gradients: list[Tensor] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Distance:
    """Relative, as norms over the steps in which both sent as many tokens to each expert. alike: such steps, a part of all.

    The other steps compute another function: a token whose two best experts are as good but for rounding goes elsewhere, and moves the
    gradient ten times as far as rounding does (1.5e-2 instead of 1.5e-3 in fp16).
    """

    loss: float
    gradient: float
    alike: float

    def within(self, own: "Distance") -> bool:
        """Of two walks, in 16 bit, of which one has the error `own`: the other may be as exact as that one, by the triangle inequality.

        A gradient's error has as many parts as the model has elements, a loss's one per step: where these cancel by chance, they say nothing
        of another walk's. A token's loss is as exact as its forward, of which gradients are made, and the mean over a batch is better by the
        root of the tokens.
        """
        enough = self.alike >= ALIKE and own.alike >= ALIKE
        loss = max(own.loss, own.gradient / math.sqrt(TOKENS))
        return enough and self.loss <= 2 * loss and self.gradient <= 2 * own.gradient


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """A model under a strategy, and its part of each batch. cut: (replicas, micro-batches) of another layout, whose parts this one rank
    computes one after another; by default its own part."""

    engine: Engine
    cut: tuple[int, int] | None

    def step(self, number: int) -> float:
        """Runs one optimizer step. Returns the loss of the full batch."""
        mesh = self.engine.process.mesh
        replicas, micro_batches = self.cut or (mesh.replicas, self.engine.accumulation_steps)
        parts = [[part.chunk(micro_batches) for part in full.chunk(replicas)] for full in batch(number)]
        if self.cut:
            parts = [[torch.cat(same) for same in zip(*part, strict=True)] for part in parts]
        else:
            parts = [part[mesh.replica] for part in parts]
        loss = self.engine.train_batch(list(zip(*parts, strict=True)))
        return float(self.engine.comm.gather_scalars(loss.detach().double().view(1), label="loss").mean())


def run_cell(
    process: Process, *, layout: str, stage: int, tier: str, dtype: str, seed: int = 3, steps: int = 20
) -> Cell:
    """One cell of the matrix, on this rank. seed: of the first weights."""
    return _train(_in_layout(process, layout=layout, stage=stage, tier=tier, dtype=dtype, seed=seed), steps=steps)


def run_alone(process: Process, *, layout: str | None = None, dtype: str, seed: int = 3, steps: int = 20) -> Cell:
    """The one-rank run that cells are compared with. layout: one with experts, whose micro-batches the run takes; by default no experts."""
    return _train(_on_one_rank(process, layout=layout, dtype=dtype, seed=seed), steps=steps)


def walk_alone(process: Process, *, layout: str | None = None, dtype: str, folder: str, steps: int = 20) -> Walk:
    """Like `run_alone`; saves the state at the start of each step in `folder`."""
    run = _on_one_rank(process, layout=layout, dtype=dtype)
    return _walk(run, steps=steps, begin=lambda number: save(run.engine, folder=folder, keep=None))


def follow(process: Process, *, layout: str, stage: int, tier: str, dtype: str, folder: str, steps: int = 20) -> Walk:
    """The layout's steps from the states in `folder`."""
    run = _in_layout(process, layout=layout, stage=stage, tier=tier, dtype=dtype)
    return _walk(run, steps=steps, begin=lambda number: load(run.engine, path=_state(folder, number=number)))


def follow_alone(process: Process, *, layout: str | None = None, dtype: str, folder: str, steps: int = 20) -> Walk:
    """One rank's steps in `dtype` from the states in `folder`."""
    run = _on_one_rank(process, layout=layout, dtype=dtype)
    return _walk(run, steps=steps, begin=lambda number: load(run.engine, path=_state(folder, number=number)))


def walk_twice(pool: RankPool, *, layout: str | None, dtype: str, folder: str, steps: int = 20) -> tuple[Walk, Walk]:
    """The one-rank run, and the steps in fp32 from its states, which lie in `folder` afterwards. pool: of one rank."""
    given = {"layout": layout, "folder": folder, "steps": steps}
    return pool.run(walk_alone, dtype=dtype, **given)[0], pool.run(follow_alone, dtype="fp32", **given)[0]


def _state(folder: str, *, number: int) -> Path:
    return Path(folder) / f"step-{number:06d}"


def cut_of(layout: str) -> tuple[int, int]:
    """(replicas, micro-batches of each) that a step's batch is cut into."""
    world, topology = LAYOUTS[layout]
    replicas = world // (topology.tensor * topology.pipeline * topology.sequence_ranks)
    return replicas, MICRO_BATCHES if topology.pipeline > 1 else 1


def _in_layout(process: Process, *, layout: str, stage: int, tier: str, dtype: str, seed: int = 3) -> _Run:
    _, topology = LAYOUTS[layout]
    strategy = Strategy(topology=topology, stage=stage, offload=tier, dtype=dtype, seed=seed)
    place = arranged(process, topology=topology)
    return _build(place, strategy=strategy, experts=topology.expert > 1, micro_batches=cut_of(layout)[1])


def _on_one_rank(process: Process, *, layout: str | None, dtype: str, seed: int = 3) -> _Run:
    cut = None if layout is None else cut_of(layout)
    strategy, micro_batches = Strategy(dtype=dtype, seed=seed), cut[1] if cut else 1
    return _build(alone(process), strategy=strategy, experts=cut is not None, micro_batches=micro_batches, cut=cut)


def _build(
    process: Process, *, strategy: Strategy, experts: bool, micro_batches: int, cut: tuple[int, int] | None = None
) -> _Run:
    # A scale at which no step is skipped: gradients are summed before they are divided, so a layout would skip others.
    strategy = replace(strategy, loss_scale=2.0**10, options={"accumulation_steps": micro_batches})
    return _Run(engine=make_engine(process, strategy=strategy, config=EXPERTS if experts else CONFIG), cut=cut)


def _train(run: _Run, *, steps: int) -> Cell:
    losses, norms = [], []
    for number in range(steps):
        losses.append(run.step(number))
        norms.append(run.engine.read_metrics().grad_norm)
    bits = hashlib.sha256(torch.tensor(losses, dtype=torch.float64).numpy().tobytes())
    for _, value in run.engine.zero.full_parameters():
        bits.update(value.float().contiguous().numpy().tobytes())
    run.engine.close()
    return Cell(losses=losses, grad_norms=norms, digest=bits.hexdigest())


def _walk(run: _Run, *, steps: int, begin: Callable[[int], object]) -> Walk:
    """begin(step): before each step."""
    losses, loads, gradients = [], [], []
    for number in range(steps):
        begin(number)
        before = _first_moments(run.engine)
        losses.append(run.step(number))
        loads.append(run.engine.read_module_metrics().get("moe.load"))
        gradients.append((_first_moments(run.engine) - BETA * before) / (1 - BETA))
    rank = run.engine.process.rank
    run.engine.close()
    return Walk(losses=losses, loads=loads, gradients=gradients if rank == 0 else None)


def _first_moments(engine: Engine) -> Tensor:
    """Of the full model, parameters by name."""
    states = canonical(engine)
    return torch.cat([states[key] for key in sorted(states) if key[0] == "exp_avg"])


def deviation(cell: Cell, *, reference: Cell) -> float:
    """The largest relative difference of a step's loss."""
    return max(abs(a - b) / abs(b) for a, b in zip(cell.losses, reference.losses, strict=True))


def distance(walk: Walk, *, reference: Walk) -> Distance:
    """Between two walks from the same states."""
    alike = [step for step, load in enumerate(walk.loads) if load == reference.loads[step]]
    if not alike:
        return Distance(loss=math.inf, gradient=math.inf, alike=0.0)
    losses, of = (
        torch.tensor([each.losses[step] for step in alike], dtype=torch.float64) for each in (walk, reference)
    )
    gradients, of_gradients = (
        torch.cat([each.gradients[step] for step in alike]).double() for each in (walk, reference)
    )
    return Distance(
        loss=float((losses - of).norm() / of.norm()),
        gradient=float((gradients - of_gradients).norm() / of_gradients.norm()),
        alike=len(alike) / len(walk.losses),
    )


assert BATCH % (2 * MICRO_BATCHES) == 0
