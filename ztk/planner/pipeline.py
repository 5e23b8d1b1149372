"""Combines the ranks of a pipeline: each is planned alone, and the schedule then determines when messages arrive."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ztk.parallel.pipeline import Action, Costs, Schedule
from ztk.parallel.pipeline.simulate import simulate
from ztk.planner.lanes import StepTime


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Times of one pipeline rank in a step. seconds: duration of each of its actions. outside: seconds before its first action and after
    its last one.
    transfer: seconds of its longest message."""

    schedule: Schedule
    seconds: Mapping[Action, float]
    outside: float
    transfer: float


def joined(times: Sequence[StepTime], *, stages: Sequence[StageTimes]) -> list[StepTime]:
    """The steps of the ranks of one pipeline, including waits for each other. times: each rank's alone."""
    schedule = stages[0].schedule
    seconds = {action: value for stage in stages for action, value in stage.seconds.items()}
    costs = Costs(transfer=max(stage.transfer for stage in stages))
    computes = [schedule.computes(rank) for rank in range(len(stages))]
    timeline = simulate(computes, costs=costs, seconds=seconds)
    found = []
    for rank, (time, stage) in enumerate(zip(times, stages, strict=True)):
        step = max(timeline.length + stage.outside, time.seconds)
        bubble = timeline.length - timeline.busy(rank)
        found.append(replace(time, seconds=step, waiting=time.waiting + bubble))
    return found
