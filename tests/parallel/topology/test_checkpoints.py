"""A checkpoint belongs to the model: saved under one topology, loaded under another."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.checkpoint.runs import canonical, digest
from tests.parallel.topology.runs import Strategy, alone, make_engine, train_step
from ztk.checkpoint import load, save
from ztk.checkpoint.verify import verify
from ztk.core.runtime import Process, Topology

SAVED_AT, STEPS = 3, 6
# As in test_layouts.py: another order of summation moves a loss by a few units of rounding, which six steps hardly amplify.
RELATIVE = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The place of a run. ranks=0: on each rank alone."""

    name: str
    ranks: int
    strategy: Strategy


PLACES = [
    Place(name="alone", ranks=0, strategy=Strategy()),
    Place(name="dp4 stage 1", ranks=4, strategy=Strategy(stage=1)),
    Place(
        name="tp2_dp2 stage 3 nvme", ranks=4, strategy=Strategy(topology=Topology(tensor=2), stage=3, offload="nvme")
    ),
    Place(name="tp2_dp2 stage 0", ranks=4, strategy=Strategy(topology=Topology(tensor=2))),
    Place(
        name="sp2_dp2 stage 2 cpu", ranks=4, strategy=Strategy(topology=Topology(sequence=2), stage=2, offload="cpu")
    ),
    Place(name="tp2_sp2 stage 3", ranks=4, strategy=Strategy(topology=Topology(tensor=2, sequence=2), stage=3)),
    Place(
        name="tp2_pp2 stage 1 nvme",
        ranks=4,
        strategy=Strategy(
            topology=Topology(tensor=2, pipeline=2), stage=1, offload="nvme", options={"accumulation_steps": 2}
        ),
    ),
    Place(
        name="pp4 stage 3",
        ranks=4,
        strategy=Strategy(topology=Topology(pipeline=4), stage=3, options={"accumulation_steps": 4}),
    ),
]


def save_and_go_on(process: Process, *, place: Place, folder: str) -> tuple[str, list[float]]:
    """Trains, saves at SAVED_AT, goes on: digest of all states when saved, losses afterwards."""
    engine = _engine(process, place=place)
    for step in range(SAVED_AT):
        train_step(engine, step=step)
    states = digest(canonical(engine))
    if place.ranks or process.rank == 0:
        save(engine, folder=folder)
    losses = [train_step(engine, step=step) for step in range(SAVED_AT, STEPS)]
    engine.close()
    return states, losses


def load_and_go_on(process: Process, *, place: Place, folder: str) -> tuple[str, list[float]]:
    engine = _engine(process, place=place)
    load(engine, path=folder)
    states = digest(canonical(engine))
    losses = [train_step(engine, step=step) for step in range(SAVED_AT, STEPS)]
    engine.close()
    return states, losses


def _engine(process: Process, *, place: Place):
    arranged = process.arrange(place.strategy.topology) if place.ranks else alone(process)
    return make_engine(arranged, strategy=place.strategy)


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> Callable[[Place], tuple[Path, str, list[float]]]:
    """Place -> the folder, the digest of the saved values, the losses of the uninterrupted run."""

    @functools.cache
    def of(name: str) -> tuple[Path, str, list[float]]:
        place = next(place for place in PLACES if place.name == name)
        folder = tmp_path_factory.mktemp("checkpoints") / "saved"
        states, losses = ranks(4).run(save_and_go_on, place=place, folder=str(folder))[0]
        assert not verify(next(folder.glob("step-*"))).faults
        return folder, states, losses

    return lambda place: of(place.name)


# Every place is left, entered by an unlike one, and returned to; all pairs would take minutes and show no more.
PAIRS = [(before, PLACES[(index + step) % len(PLACES)]) for index, before in enumerate(PLACES) for step in (0, 3)]


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda place: place.name)
def test_any_topology_to_any_topology(ranks, saved, before, after):
    folder, states, losses = saved(before)
    for got_states, got_losses in ranks(4).run(load_and_go_on, place=after, folder=str(folder)):
        assert got_states == states  # bit for bit in canonical form
        if before is after:
            assert got_losses == losses
        else:
            assert got_losses == pytest.approx(losses, rel=RELATIVE)
