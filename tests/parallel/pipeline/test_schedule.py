"""Schedules without processes: each is valid for many sizes, has the length of its formula, and holds no more than allowed."""

from dataclasses import replace

import pytest

from tests.parallel.pipeline.valid import BadSchedule, validate
from ztk.parallel.pipeline import (
    Action,
    Costs,
    Kind,
    bubble_share,
    make_inference_schedule,
    make_schedule,
    zero_bubble_share,
)
from ztk.parallel.pipeline.simulate import Stuck, simulate

SIZES = [(p, m) for p in (1, 2, 3, 4, 5, 8) for m in (1, 2, 3, 4, 5, 8, 15, 16)]
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("interleaved", 3)]


def schedules(name: str, virtual_stages: int):
    for p, m in SIZES:
        if name != "interleaved" or m % p == 0:
            yield make_schedule(name, num_ranks=p, num_micro_batches=m, virtual_stages=virtual_stages)


def live_micro_batches(schedule) -> list[int]:
    """Per rank: the largest number of (stage, micro-batch) pairs whose activations are held at one time.

    Activations are held from the forward to the backward, or to the gradients of the weights if these are computed separately.
    """
    last = Kind.backward_weight if schedule.is_split else Kind.backward
    peaks = []
    for rank in range(schedule.num_ranks):
        live = peak = 0
        for action in schedule.computes(rank):
            live += (action.kind is Kind.forward) - (action.kind is last)
            peak = max(peak, live)
        peaks.append(peak)
    return peaks


@pytest.mark.parametrize(("name", "virtual_stages"), SCHEDULES)
def test_every_schedule_is_valid(name, virtual_stages):
    for schedule in schedules(name, virtual_stages):
        validate(schedule)


def test_evaluation_runs_forwards_alone():
    for p, m in SIZES:
        for virtual_stages in (1, 2):
            schedule = make_inference_schedule(num_ranks=p, num_micro_batches=m, virtual_stages=virtual_stages)
            validate(schedule, is_training=False)


@pytest.mark.parametrize(("name", "virtual_stages"), [pair for pair in SCHEDULES if pair[0] != "zero_bubble"])
def test_the_simulated_bubble_is_the_formula(name, virtual_stages):
    for schedule in schedules(name, virtual_stages):
        formula = bubble_share(
            num_ranks=schedule.num_ranks, num_micro_batches=schedule.num_micro_batches, virtual_stages=virtual_stages
        )
        for costs in (Costs(), Costs(forward=3.0, backward_input=1.0, backward_weight=4.0)):
            assert schedule.timeline(costs).idle_share == pytest.approx(formula, abs=1e-12)


@pytest.mark.parametrize("costs", [Costs(), Costs(forward=3.0, backward_input=4.0, backward_weight=2.0)])
def test_the_zero_bubble_is_the_formula(costs):
    for schedule in schedules("zero_bubble", 1):
        if schedule.num_micro_batches >= schedule.num_ranks:
            sizes = {"num_ranks": schedule.num_ranks, "num_micro_batches": schedule.num_micro_batches}
            formula = zero_bubble_share(**sizes, costs=costs)
            assert schedule.timeline(costs).idle_share == pytest.approx(formula, abs=1e-12)


def test_how_many_micro_batches_are_alive():
    """GPipe holds all; 1F1B as many as there are ranks behind and itself; zero-bubble never more than 1F1B's first rank."""
    for schedule in schedules("gpipe", 1):
        assert live_micro_batches(schedule) == [schedule.num_micro_batches] * schedule.num_ranks
    for schedule in schedules("1f1b", 1):
        p, m = schedule.num_ranks, schedule.num_micro_batches
        assert live_micro_batches(schedule) == [min(m, p - rank) for rank in range(p)]
    for schedule in schedules("zero_bubble", 1):
        p, m = schedule.num_ranks, schedule.num_micro_batches
        assert max(live_micro_batches(schedule)) <= min(m, p)
    for virtual_stages in (2, 3):
        for schedule in schedules("interleaved", virtual_stages):
            p, m = schedule.num_ranks, schedule.num_micro_batches
            most = [min(virtual_stages * m, 2 * (p - rank - 1) + (virtual_stages - 1) * p + 1) for rank in range(p)]
            assert live_micro_batches(schedule) == most


def test_transfers_are_one_per_boundary_and_micro_batch_each_way():
    for name, virtual_stages in SCHEDULES:
        for schedule in schedules(name, virtual_stages):
            boundaries = schedule.num_stages - 1 if schedule.num_ranks > 1 else 0
            for kind in (Kind.send_activation, Kind.receive_gradient):
                count = sum(action.kind is kind for actions in schedule.ranks for action in actions)
                assert count == boundaries * schedule.num_micro_batches


def planted(schedule, *, rank: int, actions: list[Action]):
    return replace(schedule, ranks=(*schedule.ranks[:rank], tuple(actions), *schedule.ranks[rank + 1 :]))


def test_the_validator_sees_mistakes():
    schedule = make_schedule("1f1b", num_ranks=2, num_micro_batches=3)
    actions = list(schedule.ranks[0])

    twice = planted(schedule, rank=0, actions=[actions[0], *actions])
    with pytest.raises(BadSchedule, match=r"rank 0 does F0\.0 2 times, expected 1"):
        validate(twice)

    sends = [index for index, action in enumerate(actions) if action.kind is Kind.send_activation]
    early = planted(schedule, rank=0, actions=[actions[sends[0]], *(a for a in actions if a != actions[sends[0]])])
    with pytest.raises(BadSchedule, match=r"rank 0 does SA0\.0 before it has F0\.0"):
        validate(early)

    late = [action for action in actions if action.kind is not Kind.receive_gradient]
    with pytest.raises(BadSchedule, match="before it has B1"):
        validate(planted(schedule, rank=0, actions=late))

    # Each rank first sends, then receives: correct where sends are stored, a cycle where they wait.
    send, receive = actions[sends[1]], next(a for a in actions if a.kind is Kind.receive_gradient)
    i, j = sorted((actions.index(send), actions.index(receive)))
    actions[i], actions[j] = actions[j], actions[i]
    with pytest.raises(BadSchedule):
        validate(planted(schedule, rank=0, actions=actions))


def test_a_cycle_is_named():
    forward = [Action(kind=Kind.forward, stage=stage, micro_batch=0) for stage in range(2)]
    backward = [Action(kind=Kind.backward, stage=stage, micro_batch=0) for stage in range(2)]
    with pytest.raises(Stuck, match=r"none of B0\.0, F1\.0 can begin"):
        simulate([[backward[0], forward[0]], [forward[1], backward[1]]], costs=Costs())


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("interleaved", {"num_ranks": 2, "num_micro_batches": 4}, r"topology\.virtual_stages=2"),
        (
            "interleaved",
            {"num_ranks": 4, "num_micro_batches": 6, "virtual_stages": 2},
            r"multiple of topology\.pipeline=4",
        ),
        ("1f1b", {"num_ranks": 2, "num_micro_batches": 4, "virtual_stages": 2}, r"topology\.schedule=interleaved"),
        ("gpipe", {"num_ranks": 2, "num_micro_batches": 0}, "at least 1"),
        ("ring", {"num_ranks": 2, "num_micro_batches": 4}, "ring"),
    ],
)
def test_refusals_name_the_fix(name, sizes, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(name, **sizes)
