"""Simulated times of the actions of a pipeline, from the cost of each action, and closed formulas to compare with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ztk.parallel.pipeline.actions import Action, Kind, needs


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Durations of the actions of one stage, in any unit. A backward takes `backward_input + backward_weight`.

    transfer: from the end of an action until the next stage may use its output; both ranks may compute meanwhile.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0

    def of(self, kind: Kind) -> float:
        """The cost of a computation. Raises ValueError for a transfer."""
        match kind:
            case Kind.forward:
                return self.forward
            case Kind.backward:
                return self.backward_input + self.backward_weight
            case Kind.backward_input:
                return self.backward_input
            case Kind.backward_weight:
                return self.backward_weight
            case _:
                raise ValueError(f"{kind.name} is no computation")


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """`action` ran on pipeline rank `rank` from `start` to `stop`."""

    rank: int
    action: Action
    start: float
    stop: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Intervals of all ranks' actions, simulated here or measured by the engine."""

    intervals: tuple[Interval, ...]

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks in the timeline."""
        return 1 + max(interval.rank for interval in self.intervals)

    @property
    def length(self) -> float:
        """From the first start to the last stop."""
        return max(i.stop for i in self.intervals) - min(i.start for i in self.intervals)

    def busy(self, rank: int) -> float:
        """Total time that `rank` computed."""
        return sum(i.stop - i.start for i in self.intervals if i.rank == rank)

    @property
    def idle_share(self) -> float:
        """The bubble: the share of all ranks' time in which they did not compute."""
        return 1.0 - sum(self.busy(rank) for rank in range(self.num_ranks)) / (self.num_ranks * self.length)


class Stuck(ValueError):
    """The ranks wait for each other."""


def simulate(
    computes: Sequence[Sequence[Action]], *, costs: Costs, seconds: Mapping[Action, float] | None = None
) -> Timeline:
    """Runs `computes[r]` on rank r in the given order, each action as soon as its inputs are available.

    seconds: the cost of each action, replacing the costs by kind.

    Raises `Stuck` if no rank can continue.
    """
    num_ranks = len(computes)
    num_stages = 1 + max(action.stage for actions in computes for action in actions)
    is_split = any(action.kind is Kind.backward_input for actions in computes for action in actions)
    over: dict[Action, float] = {}
    position, free_at = [0] * num_ranks, [0.0] * num_ranks
    intervals: list[Interval] = []
    remaining = sum(len(actions) for actions in computes)
    while remaining:
        before = remaining
        for rank, actions in enumerate(computes):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                needed = needs(action, num_stages=num_stages, is_split=is_split)
                if any(other not in over for other in needed):
                    break
                arrivals = (over[n] + costs.transfer * (n.stage % num_ranks != rank) for n in needed)
                start = max([free_at[rank], *arrivals])
                free_at[rank] = over[action] = start + (costs.of(action.kind) if seconds is None else seconds[action])
                intervals.append(Interval(rank=rank, action=action, start=start, stop=free_at[rank]))
                position[rank] += 1
                remaining -= 1
        if remaining == before:
            stuck = [str(actions[at]) for actions, at in zip(computes, position, strict=True) if at < len(actions)]
            raise Stuck(f"none of {', '.join(stuck)} can begin")
    return Timeline(intervals=tuple(sorted(intervals, key=lambda interval: (interval.start, interval.rank))))


def bubble_share(*, num_ranks: int, num_micro_batches: int, virtual_stages: int = 1) -> float:
    """Idle share of GPipe and 1F1B, (p - 1) / (m + p - 1), and with v stages per rank (p - 1) / (v m + p - 1), for equal stages.

    Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, sections 2.1 and 2.2, who divide by the ideal time; here by the total.
    """
    idle = num_ranks - 1
    return idle / (virtual_stages * num_micro_batches + idle)


def zero_bubble_share(*, num_ranks: int, num_micro_batches: int, costs: Costs) -> float:
    """Idle share of ZB-H1 for equal stages: (p - 1)(F + I - W) of idle time and m (F + I + W) of work.

    Qi et al. 2023, https://arxiv.org/abs/2401.10241, table 1. Holds for W <= F and W <= I, and m >= p.
    """
    idle = (num_ranks - 1) * (costs.forward + costs.backward_input - costs.backward_weight)
    work = num_micro_batches * (costs.forward + costs.backward_input + costs.backward_weight)
    return idle / (idle + work)
