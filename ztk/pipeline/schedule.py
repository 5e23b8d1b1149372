"""Pipeline schedules as data: for every rank, the list of actions of one batch.

Two phases. First the order in which each rank computes, which is all that tells the schedules apart; each is a few lines below. Then
sends and receives are put between, the same way for all.

[Note: One order of all events]
A schedule is made to happen once, with equal costs (`ztk.pipeline.simulate`), and every transfer is placed at the moment when its
sender has computed it, on both sides. So each rank's list is a part of one single order of all events of all ranks. The first event
of that order that has not happened yet can always happen: no cycle of ranks can wait for each other, even where every send
waits for its receiver, and messages between two ranks arrive in the order in which they are expected.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from ztk.pipeline.actions import Action, Kind
from ztk.pipeline.simulate import Costs, Timeline, simulate


class ScheduleName(StrEnum):
    """The schedules that can be asked for by name."""

    gpipe = "gpipe"
    one_f_one_b = "1f1b"
    interleaved = "interleaved"
    zero_bubble = "zero_bubble"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """`ranks[r]`: what pipeline rank r does in one batch of `num_micro_batches`. Stage s runs on rank s modulo the number of ranks."""

    name: ScheduleName
    num_stages: int
    num_micro_batches: int
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def is_split(self) -> bool:
        """Gradients of weights are computed apart from those of inputs."""
        return self.name is ScheduleName.zero_bubble

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that runs `stage`."""
        return stage % self.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that run on pipeline rank `rank`."""
        return tuple(range(rank, self.num_stages, self.num_ranks))

    def computes(self, rank: int) -> list[Action]:
        """`ranks[rank]` without its transfers."""
        return [action for action in self.ranks[rank] if action.kind.computes]

    def timeline(self, costs: Costs | None = None) -> Timeline:
        """When everything happens if actions take as long as `costs` says."""
        return simulate([self.computes(rank) for rank in range(self.num_ranks)], costs=costs or Costs())


def make_schedule(
    name: ScheduleName | str, *, num_ranks: int, num_micro_batches: int, virtual_stages: int = 1
) -> Schedule:
    """The schedule `name` for one batch.

    virtual_stages: stages per rank; more than one for `interleaved` alone. Raises ValueError for what the schedule cannot do.
    """
    name = ScheduleName(name)
    check(name, num_ranks=num_ranks, num_micro_batches=num_micro_batches, virtual_stages=virtual_stages)
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
    """Forwards alone: for evaluation."""
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


def check(name: ScheduleName, *, num_ranks: int, num_micro_batches: int, virtual_stages: int) -> None:
    """Raises ValueError if the schedule cannot be made, with the mend."""
    if num_ranks < 1 or num_micro_batches < 1 or virtual_stages < 1:
        raise ValueError(
            f"a pipeline of {num_ranks} ranks x {virtual_stages} virtual stages over {num_micro_batches} micro-batches: "
            "each must be at least 1"
        )
    if name is ScheduleName.interleaved and virtual_stages < 2:
        raise ValueError(
            "topology.schedule=interleaved needs several stages per rank: set topology.virtual_stages=2 or more, or use "
            "topology.schedule=1f1b"
        )
    if name is not ScheduleName.interleaved and virtual_stages > 1:
        raise ValueError(
            f"topology.virtual_stages={virtual_stages}: topology.schedule={name} runs one stage per rank; use "
            "topology.schedule=interleaved or topology.virtual_stages=1"
        )
    if name is ScheduleName.interleaved and num_micro_batches % num_ranks:
        raise ValueError(
            f"topology.schedule=interleaved runs micro-batches in rounds of one per pipeline rank: "
            f"train.accumulation_steps={num_micro_batches} must be a multiple of topology.pipeline={num_ranks}"
        )


# The order of computing on one rank


def _gpipe(*, rank: int, num_ranks: int, num_micro_batches: int, virtual_stages: int) -> list[Action]:
    """All forwards, then all backwards (Huang et al. 2019, https://arxiv.org/abs/1811.06965)."""
    return [Action(kind=Kind.forward, stage=rank, micro_batch=i) for i in range(num_micro_batches)] + [
        Action(kind=Kind.backward, stage=rank, micro_batch=i) for i in range(num_micro_batches)
    ]


def _one_f_one_b(*, rank: int, num_ranks: int, num_micro_batches: int, virtual_stages: int) -> list[Action]:
    """Warm-up, then one forward and one backward in turn, then the backwards that are left: no more than `num_ranks - rank` micro-batches
    are alive (Narayanan et al. 2019, https://arxiv.org/abs/1806.03377, as in PipeDream-Flush, https://arxiv.org/abs/2006.09503)."""
    forwards = [Action(kind=Kind.forward, stage=rank, micro_batch=i) for i in range(num_micro_batches)]
    backwards = [Action(kind=Kind.backward, stage=rank, micro_batch=i) for i in range(num_micro_batches)]
    return _in_turn(forwards, backwards=backwards, num_warmup=num_ranks - rank - 1)


def _interleaved(*, rank: int, num_ranks: int, num_micro_batches: int, virtual_stages: int) -> list[Action]:
    """1F1B over several stages per rank: the pipeline fills in steps of one short stage, so the bubble is `virtual_stages` times smaller
    and the transfers as many times more (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2)."""
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
    """ZB-H1: 1F1B whose backward is cut in two; gradients of weights, which nobody waits for, fill what was bubble.

    Rank r puts off up to r of them, so that no rank holds more micro-batches than 1F1B's first does (Qi et al. 2023,
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
    ScheduleName.one_f_one_b: _one_f_one_b,
    ScheduleName.interleaved: _interleaved,
    ScheduleName.zero_bubble: _zero_bubble,
}


# Transfers


def _with_transfers(computes: list[list[Action]], *, num_stages: int) -> tuple[tuple[Action, ...], ...]:
    """Puts sends and receives between; see [Note: One order of all events]."""
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
    """What is sent when `action` is over."""
    if action.kind is Kind.forward and action.stage + 1 < num_stages:
        return Action(kind=Kind.send_activation, stage=action.stage, micro_batch=action.micro_batch)
    if action.kind in (Kind.backward, Kind.backward_input) and action.stage > 0:
        return Action(kind=Kind.send_gradient, stage=action.stage, micro_batch=action.micro_batch)
    return None
