"""Micro-batches of a step that are like others: a plan traces a few of them and counts the rest.

The first and the last micro-batch of a step differ from the others: gathers that no backward has prefetched, the reduction of complete
gradients. All others move, compute and wait alike. So of a long step the first ones and the last one are traced, and what a middle one
counts is added for every micro-batch that was left out. Schedules that keep all micro-batches alive are traced completely.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ztk.core.policies.pipeline import PipelinePolicy, ScheduleName
from ztk.core.runtime import Mesh
from ztk.core.runtime.io import IoCounters
from ztk.parallel.pipeline import Action, Interval
from ztk.planner.lanes import Lanes, Mark
from ztk.planner.tracker import StepTracker

TRACED = 4  # micro-batches without a pipeline: the first, two of the middle, the last


def traced_micro_batches(count: int, *, stages: int, policy: PipelinePolicy) -> int:
    """How many of a step's `count` micro-batches are traced. stages: ranks of the pipeline."""
    if stages == 1:
        return min(count, TRACED)
    if policy.schedule is ScheduleName.one_f_one_b:
        return min(count, stages + 2)  # as many as are alive on the first stage, and two more
    if policy.schedule is ScheduleName.interleaved:
        return min(
            count, 2 * stages
        )  # (virtual_stages + 1) * stages - 1 parts of them are alive, of 2 * stages * virtual_stages
    return count


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """What one rank has counted since its step began. wire: by communicator and kind. None as `clock`: there is none."""

    wire: tuple[Mapping[str, int], ...]
    disk_read: int
    disk_write: int
    flops: int
    clock: Mark | None


class Repeater:
    """Reads the counters of one traced rank, and adds to them what micro-batches count that were not traced. lanes: its clock, if any."""

    def __init__(self, *, mesh: Mesh, io: IoCounters, tracker: StepTracker, lanes: Lanes | None) -> None:
        self._mesh, self._io, self._tracker, self.lanes = mesh, io, tracker, lanes

    def read(self) -> Counted:
        """The counters now."""
        return Counted(
            wire=tuple(dict(comm.counters.bytes) for comm in self._mesh.comms),
            disk_read=self._io.read_bytes,
            disk_write=self._io.write_bytes,
            flops=self._tracker.flops,
            clock=None if self.lanes is None else self.lanes.mark(),
        )

    def repeat(self, *, start: Counted, stop: Counted, times: int) -> tuple[int, int]:
        """Counts `times` times what happened between two readings. Returns the bytes of that from the disk and to it."""
        for comm, before, after in zip(self._mesh.comms, start.wire, stop.wire, strict=True):
            for kind, nbytes in after.items():
                comm.counters.bytes[kind] += times * (nbytes - before.get(kind, 0))
        self._tracker.flops += times * (stop.flops - start.flops)
        if self.lanes is not None and start.clock is not None and stop.clock is not None:
            self.lanes.repeat(start=start.clock, stop=stop.clock, times=times)
        return times * (stop.disk_read - start.disk_read), times * (stop.disk_write - start.disk_write)

    def announce(self, *, start: Counted, stop: Counted, traced: int, left_out: int) -> None:
        """A pipeline announces its `traced` micro-batches' shapes between two readings, and would announce those left out, too."""
        for comm, before, after in zip(self._mesh.comms, start.wire, stop.wire, strict=True):
            if announced := after.get("scalars", 0) - before.get("scalars", 0):
                comm.counters.bytes["scalars"] += announced // traced * left_out


def middle_actions(intervals: Sequence[Interval], *, traced: int) -> list[int]:
    """Positions in `intervals` of the actions of one micro-batch that is neither the first nor the last."""
    return [number for number, interval in enumerate(intervals) if interval.action.micro_batch == traced // 2]


def seconds_of_actions(
    computes: Sequence[Action], *, intervals: Sequence[Interval], traced: int, count: int
) -> dict[Action, float]:
    """Seconds of all actions of a rank in a step of `count` micro-batches, of which `traced` were traced: the first ones and the last."""
    known = {interval.action: interval.stop - interval.start for interval in intervals}
    return {action: known[_like(action, traced=traced, count=count)] for action in computes}


def _like(action: Action, *, traced: int, count: int) -> Action:
    """The traced action that takes as long."""
    number, middle = action.micro_batch, traced // 2
    last = traced - 1 - middle  # micro-batches after the middle one
    like = traced - (count - number) if number >= count - last else min(number, middle)
    return Action(kind=action.kind, stage=action.stage, micro_batch=like)
