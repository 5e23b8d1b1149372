"""The host's reads of the device in a step: none that a CUDA graph of the step forbids, except for listed reasons.

A plan runs the step on tensors without values, so a read that is not announced (`Tensor.item`, `tolist`, a comparison) raises.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

from tests.core.streams.model import StreamModel, modelled
from tests.planner.measure import Case, planned
from ztk.core.runtime import planned as planned_tensors
from ztk.core.runtime.planned import on_host, watch_reads
from ztk.planner.trace import STEPS
from ztk.planner.tracker import StepTracker
from ztk.train.engine import Engine

LATE = "overflow status of the step before"
OFFLOADED = "decision to step: states are updated on the host"
DECISION = "decision to step: the optimizer does not read it"
ROWS = "rows per rank of the experts"
CASES: list[tuple[Case, frozenset[str]]] = [
    (Case(ranks=1, stage=0, dtype="fp32"), frozenset()),
    (Case(ranks=2, stage=0, dtype="bf16"), frozenset()),
    (Case(ranks=2, stage=1, dtype="bf16"), frozenset()),
    (Case(ranks=2, stage=2, dtype="bf16", accumulation=2), frozenset()),
    (Case(ranks=2, stage=3, dtype="fp32"), frozenset()),
    (Case(ranks=8, stage=3, dtype="bf16", recompute="full"), frozenset()),
    (Case(ranks=2, stage=3, dtype="fp16"), frozenset()),  # the loss scale is the device's own
    (Case(ranks=2, stage=3, dtype="bf16", states="8bit", master="stochastic"), frozenset()),
    (Case(ranks=4, stage=2, dtype="bf16", tensor=2, sequence_parallel=True), frozenset()),
    (Case(ranks=4, stage=3, dtype="bf16", sequence=2), frozenset()),
    (Case(ranks=2, stage=3, dtype="bf16", context=2), frozenset()),
    (Case(ranks=2, stage=3, dtype="bf16", experts=4), frozenset()),
    (Case(ranks=2, stage=1, dtype="bf16", pipeline=2, accumulation=2), frozenset()),
    (Case(ranks=4, stage=3, dtype="bf16", experts=4, expert=2), frozenset({ROWS})),
    (Case(ranks=2, stage=1, dtype="bf16", offload="cpu"), frozenset({OFFLOADED, DECISION})),
    (Case(ranks=2, stage=3, dtype="bf16", offload="nvme", parameters="nvme"), frozenset({OFFLOADED, DECISION})),
    (Case(ranks=2, stage=3, dtype="bf16", optimizer="muon"), frozenset({DECISION})),
    (Case(ranks=2, stage=3, dtype="bf16", optimizer="lamb"), frozenset({DECISION})),
]


@contextmanager
def last_steps(model: StreamModel, *, captures: bool) -> Iterator[tuple[set[str], list[int]]]:
    """The host's reads in the last step of each rank, and its number of waits. captures: the steps are recorded into a graph."""
    reads: set[str] = set()
    waits: list[int] = []
    steps = {"begun": 0, "waits": 0}
    restart, unwatch = StepTracker.restart, StepTracker.unwatch

    def begin(tracker: StepTracker) -> None:
        steps["begun"] += 1
        is_last = steps["begun"] == STEPS
        model.captures, steps["waits"] = captures and is_last, model.waits
        restart(tracker)

    def end(tracker: StepTracker) -> None:
        waits.append(model.waits - steps["waits"])
        model.captures, steps["begun"] = False, 0
        unwatch(tracker)

    def seen(what: str) -> None:
        if steps["begun"] == STEPS:
            reads.add(what)

    with mock.patch.multiple(StepTracker, restart=begin, unwatch=end), watch_reads(seen):
        yield reads, waits


@pytest.mark.parametrize(("case", "expected"), CASES, ids=lambda value: str(value) if isinstance(value, Case) else "")
def test_what_a_step_reads(case, expected, tmp_path):
    with modelled() as model, last_steps(model, captures=True) as (reads, waits):
        planned(case, folder=str(tmp_path))
    assert reads == expected and waits
    if not reads:
        assert not any(waits)


def test_outside_of_a_graph_the_host_looks_one_step_late(tmp_path):
    with modelled() as model, last_steps(model, captures=False) as (reads, waits):
        planned(Case(ranks=1, stage=0, dtype="bf16"), folder=str(tmp_path))
    assert reads == {LATE} and waits == [1] and not model.races


def test_a_planted_wait_is_counted(tmp_path, monkeypatch):
    step = Engine.step

    def waiting(engine: Engine) -> bool:
        on_host(engine.control.control, name="planted")
        return step(engine)

    monkeypatch.setattr(Engine, "step", waiting)
    with modelled() as model, last_steps(model, captures=True) as (reads, waits):
        planned(Case(ranks=1, stage=0, dtype="bf16"), folder=str(tmp_path))
    assert reads == {"planted"} and waits == [1]


def test_every_read_has_its_reason_in_the_note():
    note = planned_tensors.__doc__ or ""
    for what in {LATE, *(what for _, expected in CASES for what in expected)}:
        assert f"`{what}`" in note, what
