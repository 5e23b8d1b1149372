"""Pipeline schedules as data: for every rank, the list of actions of one batch.

A schedule is made in two phases. First comes the order in which each rank computes: schedules differ in nothing else, and each takes a few
lines below. Then sends and receives are inserted, in the same way for all.

[Note: One order of all events]
The schedule is simulated once, with equal costs (`ztk.parallel.pipeline.simulate`). Each transfer is placed, on both ranks, at the time
when its sender has computed the data. So the lists of all ranks are parts of one total order of events. The first event that has not
happened can always happen: ranks cannot wait for each other in a cycle, even if every send waits for its receiver, and messages between two
ranks arrive in the expected order.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ztk.core.policies.pipeline import ScheduleName, check_schedule
from ztk.parallel.pipeline.actions import Action, Kind
from ztk.parallel.pipeline.simulate import Costs, Timeline, simulate


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """`ranks[r]`: the actions of pipeline rank r in one batch of `num_micro_batches`. Stage s runs on rank s modulo the number of ranks."""

    name: ScheduleName
    num_stages: int
    num_micro_batches: int
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.ranks)

    @property
    def is_split(self) -> bool:
        """Whether gradients of weights and of inputs are separate actions."""
        return self.name is ScheduleName.zero_bubble

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that runs `stage`."""
        return stage % self.num_ranks

    def computes(self, rank: int) -> list[Action]:
        """`ranks[rank]` without its transfers."""
        return [action for action in self.ranks[rank] if action.kind.computes]

    def timeline(self, costs: Costs | None = None) -> Timeline:
        """Start and end of each action at the given costs."""
        return simulate([self.computes(rank) for rank in range(self.num_ranks)], costs=costs or Costs())


def make_schedule(
    name: ScheduleName | str, *, num_ranks: int, num_micro_batches: int, virtual_stages: int = 1
) -> Schedule:
    """The schedule `name` for one batch.

    virtual_stages: stages per rank; more than one only for `interleaved`. Raises ValueError for unsupported numbers.
    """
    name = ScheduleName(name)
    check_schedule(name, num_ranks=num_ranks, num_micro_batches=num_micro_batches, virtual_stages=virtual_stages)
    order = _ORDERS[name]
    computes = [
        order(rank=rank, num_ranks=num_ranks, num_micro_batches=num_micro_batches, virtual_stages=virtual_stages)
        for rank in range(num_ranks)
    ]
    num_stages = num_ranks * virtual_stages
    return Schedule(
        name=name,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        ranks=_with_transfers(computes, num_stages=num_stages),
    )


def make_inference_schedule(*, num_ranks: int, num_micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """A schedule of forwards only, for evaluation."""
    name = ScheduleName.gpipe if virtual_stages == 1 else ScheduleName.interleaved
    num_stages = num_ranks * virtual_stages
    computes = [
        _forwards(rank=rank, num_ranks=num_ranks, num_micro_batches=num_micro_batches, virtual_stages=virtual_stages)
        for rank in range(num_ranks)
    ]
    return Schedule(
        name=name,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        ranks=_with_transfers(computes, num_stages=num_stages),
    )


# The order of computing on one rank


def _gpipe(*, rank: int, num_ranks: int, num_micro_batches: int, virtual_stages: int) -> list[Action]:
    """All forwards, then all backwards (Huang et al. 2019, https://arxiv.org/abs/1811.06965)."""
    return [Action(kind=Kind.forward, stage=rank, micro_batch=i) for i in range(num_micro_batches)] + [
        Action(kind=Kind.backward, stage=rank, micro_batch=i) for i in range(num_micro_batches)
    ]


def _one_f_one_b(*, rank: int, num_ranks: int, num_micro_batches: int, virtual_stages: int) -> list[Action]:
    """Warm-up, then one forward and one backward in turn, then the remaining backwards: at most `num_ranks - rank` micro-batches
    are in flight (Narayanan et al. 2019, https://arxiv.org/abs/1806.03377, as in PipeDream-Flush, https://arxiv.org/abs/2006.09503)."""
    forwards = [Action(kind=Kind.forward, stage=rank, micro_batch=i) for i in range(num_micro_batches)]
    backwards = [Action(kind=Kind.backward, stage=rank, micro_batch=i) for i in range(num_micro_batches)]
    return _in_turn(forwards, backwards=backwards, num_warmup=num_ranks - rank - 1)


def _interleaved(*, rank: int, num_ranks: int, num_micro_batches: int, virtual_stages: int) -> list[Action]:
    """1F1B over several stages per rank: the pipeline fills in steps of one short stage, so the bubble is `virtual_stages` times smaller
    and there are as many times more transfers (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2)."""
    forwards = _forwards(
        rank=rank, num_ranks=num_ranks, num_micro_batches=num_micro_batches, virtual_stages=virtual_stages
    )
    backwards = [
        Action(kind=Kind.backward, stage=chunk * num_ranks + rank, micro_batch=first + i)
        for first in range(0, num_micro_batches, num_ranks)
        for chunk in reversed(range(virtual_stages))
        for i in range(num_ranks)
    ]
    num_warmup = 2 * (num_ranks - rank - 1) + (virtual_stages - 1) * num_ranks
    return _in_turn(forwards, backwards=backwards, num_warmup=num_warmup)


def _zero_bubble(*, rank: int, num_ranks: int, num_micro_batches: int, virtual_stages: int) -> list[Action]:
    """ZB-H1: 1F1B whose backward is split in two. Weight gradients, for which no rank waits, fill the bubble.

    Rank r defers up to r of them, so that no rank keeps more micro-batches than the first rank does in 1F1B (Qi et al. 2023,
    https://arxiv.org/abs/2401.10241, section 2.2).
    """
    waiting: list[Action] = []
    order: list[Action] = []
    for action in _one_f_one_b(
        rank=rank, num_ranks=num_ranks, num_micro_batches=num_micro_batches, virtual_stages=virtual_stages
    ):
        if action.kind is Kind.forward:
            order.append(action)
            continue
        order.append(Action(kind=Kind.backward_input, stage=rank, micro_batch=action.micro_batch))
        waiting.append(Action(kind=Kind.backward_weight, stage=rank, micro_batch=action.micro_batch))
        if len(waiting) > rank:
            order.append(waiting.pop(0))
    return order + waiting


def _forwards(*, rank: int, num_ranks: int, num_micro_batches: int, virtual_stages: int) -> list[Action]:
    """Rounds of one micro-batch per rank go through all of the rank's stages before the next round begins."""
    return [
        Action(kind=Kind.forward, stage=chunk * num_ranks + rank, micro_batch=i)
        for first in range(0, num_micro_batches, num_ranks)
        for chunk in range(virtual_stages)
        for i in range(first, min(first + num_ranks, num_micro_batches))
    ]


def _in_turn(forwards: list[Action], *, backwards: list[Action], num_warmup: int) -> list[Action]:
    """`num_warmup` forwards, one forward and one backward in turn, the rest of the backwards."""
    num_warmup = min(num_warmup, len(forwards))
    steady = zip(forwards[num_warmup:], backwards, strict=False)
    return (
        forwards[:num_warmup] + [action for pair in steady for action in pair] + backwards[len(forwards) - num_warmup :]
    )


_ORDERS: dict[ScheduleName, Callable[..., list[Action]]] = {
    ScheduleName.gpipe: _gpipe,
    ScheduleName("1f1b"): _one_f_one_b,
    ScheduleName.interleaved: _interleaved,
    ScheduleName.zero_bubble: _zero_bubble,
}


# Transfers


def _with_transfers(computes: list[list[Action]], *, num_stages: int) -> tuple[tuple[Action, ...], ...]:
    """Inserts sends and receives; see [Note: One order of all events]."""
    num_ranks = len(computes)
    timeline = simulate(computes, costs=Costs())
    events = []  # (time, transfers before computing, rank, action)
    for interval in timeline.intervals:
        events.append((interval.start, 1, interval.rank, interval.action))
        send = _send_after(interval.action, num_stages=num_stages)
        if send is not None and num_ranks > 1:
            events.append((interval.stop, 0, interval.rank, send))
    ranks: list[list[Action]] = [[] for _ in computes]
    for _, _, rank, action in sorted(events):
        ranks[rank].append(action)
        if action.kind.sends:
            ranks[action.other_end.stage % num_ranks].append(action.other_end)
    return tuple(tuple(actions) for actions in ranks)


def _send_after(action: Action, *, num_stages: int) -> Action | None:
    """The transfer after `action`, or None."""
    if action.kind is Kind.forward and action.stage + 1 < num_stages:
        return Action(kind=Kind.send_activation, stage=action.stage, micro_batch=action.micro_batch)
    if action.kind in (Kind.backward, Kind.backward_input) and action.stage > 0:
        return Action(kind=Kind.send_gradient, stage=action.stage, micro_batch=action.micro_batch)
    return None
