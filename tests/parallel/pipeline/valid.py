"""Checks a pipeline schedule by simulating it with sends that wait for their receivers."""

from collections import Counter, deque

from ztk.parallel.pipeline.actions import Action, Kind, needs
from ztk.parallel.pipeline.schedule import Schedule


class BadSchedule(ValueError):
    """The fault and its place."""


def validate(schedule: Schedule, *, is_training: bool = True) -> None:
    """Checks that every stage processes every micro-batch exactly once, on its own rank, after its inputs are available; that every send
    has a receive; and that no ranks can wait for each other.

    Raises BadSchedule if one of these fails.
    """
    _check_once(schedule, is_training=is_training)
    _check_needs(schedule)
    _check_rendezvous(schedule)


def _check_once(schedule: Schedule, *, is_training: bool) -> None:
    backward = (Kind.backward_input, Kind.backward_weight) if schedule.is_split else (Kind.backward,)
    kinds = (Kind.forward, *(backward if is_training else ()))
    expected = {
        (schedule.rank_of(stage), Action(kind=kind, stage=stage, micro_batch=micro_batch)): 1
        for stage in range(schedule.num_stages)
        for micro_batch in range(schedule.num_micro_batches)
        for kind in kinds
    }
    found = Counter((rank, action) for rank in range(schedule.num_ranks) for action in schedule.computes(rank))
    if found != expected:
        different = [(r, a) for r, a in {*found, *expected} if found[r, a] != expected.get((r, a), 0)]
        rank, action = min(different)
        raise BadSchedule(
            f"rank {rank} does {action} {found[rank, action]} times, expected {expected.get((rank, action), 0)}"
        )


def _check_needs(schedule: Schedule) -> None:
    """Checks that a rank has computed or received all inputs of a computation, and has computed all data that it sends."""
    for rank, actions in enumerate(schedule.ranks):
        at_hand: set[Action] = set()
        for action in actions:
            if action.kind.computes:
                needed = needs(action, num_stages=schedule.num_stages, is_split=schedule.is_split)
            elif action.kind.sends:
                needed = [_computed(action, schedule=schedule)]
            else:
                needed = []
                at_hand.add(_computed(action.other_end, schedule=schedule))
            for other in needed:
                if other not in at_hand:
                    raise BadSchedule(f"rank {rank} does {action} before it has {other}")
            at_hand.add(action)


def _computed(send: Action, *, schedule: Schedule) -> Action:
    """The computation whose result `send` sends."""
    if send.kind is Kind.send_activation:
        kind = Kind.forward
    else:
        kind = Kind.backward_input if schedule.is_split else Kind.backward
    return Action(kind=kind, stage=send.stage, micro_batch=send.micro_batch)


def _check_rendezvous(schedule: Schedule) -> None:
    """Every transfer is a rendezvous: both ranks must reach it, and they leave it together."""
    left = [deque(action for action in actions if not action.kind.computes) for actions in schedule.ranks]
    while any(left):
        for rank, actions in enumerate(left):
            if not actions:
                continue
            peer = schedule.rank_of(actions[0].other_end.stage)
            if left[peer] and left[peer][0] == actions[0].other_end and peer != rank:
                actions.popleft()
                left[peer].popleft()
                break
        else:
            stuck = ", ".join(f"rank {rank} at {actions[0]}" for rank, actions in enumerate(left) if actions)
            raise BadSchedule(f"no rank can continue: {stuck}")
