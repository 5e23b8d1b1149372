"""Traces a few micro-batches of a long step, and adds the counts of a middle one for every micro-batch that is skipped.

Only the first and the last micro-batch of a step differ from the others: no backward has prefetched the gathers of the first, and the
gradients of the last are reduced. Schedules that keep all micro-batches alive are traced completely.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ztk.core.policies.pipeline import PipelinePolicy, ScheduleName
from ztk.core.runtime import Mesh
from ztk.core.runtime.io import IoCounters
from ztk.parallel.pipeline import Action, Interval
from ztk.planner.lanes import Lanes, Mark
from ztk.planner.tracker import StepTracker

TRACED = 5  # micro-batches without a pipeline: the first, three of the middle, the last


def traced_micro_batches(count: int, *, stages: int, policy: PipelinePolicy) -> int:
    """Number of a step's `count` micro-batches that are traced. stages: ranks of the pipeline."""
    if stages == 1:
        return min(count, TRACED)
    if policy.schedule is ScheduleName("1f1b"):
        return min(count, stages + 2)  # the first stage keeps one per stage alive
    if policy.schedule is ScheduleName.interleaved:
        return min(count, 2 * stages)  # at most (virtual_stages + 1) * stages - 1 of their parts are alive at once
    return count


def middle_micro_batch(traced: int, *, stages: int, policy: PipelinePolicy) -> int:
    """The traced micro-batch of a pipeline that stands for the skipped ones.

    Of an interleaved schedule the last one of the first round: in the second round gradients of one stage are reduced before the backward of
    the stage before it, which may wait for the network.
    """
    return stages - 1 if policy.schedule is ScheduleName.interleaved else traced // 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """Counters of one rank since its step began. wire: bytes by kind, for each communicator. clock: None if seconds are not planned."""

    wire: tuple[Mapping[str, int], ...]
    disk_read: int
    disk_write: int
    flops: int
    clock: Mark | None


class Repeater:
    """Reads the counters of one traced rank and extrapolates them to all micro-batches. lanes: the rank's clock, if seconds are planned."""

    def __init__(self, *, mesh: Mesh, io: IoCounters, tracker: StepTracker, lanes: Lanes | None) -> None:
        self._mesh, self._io, self._tracker, self.lanes = mesh, io, tracker, lanes

    def read(self) -> Counted:
        """Reads the counters."""
        return Counted(
            wire=tuple(dict(comm.counters.bytes) for comm in self._mesh.comms),
            disk_read=self._io.read_bytes,
            disk_write=self._io.write_bytes,
            flops=self._tracker.flops,
            clock=None if self.lanes is None else self.lanes.mark(),
        )

    def repeat(self, *, start: Counted, stop: Counted, times: int) -> tuple[int, int]:
        """Adds the counts between two readings `times` times. Returns the bytes that this adds to the reads and writes of the disk."""
        for comm, before, after in zip(self._mesh.comms, start.wire, stop.wire, strict=True):
            for kind, nbytes in after.items():
                comm.counters.bytes[kind] += times * (nbytes - before.get(kind, 0))
        self._tracker.flops += times * (stop.flops - start.flops)
        if self.lanes is not None and start.clock is not None and stop.clock is not None:
            self.lanes.repeat(start=start.clock, stop=stop.clock, times=times)
        return times * (stop.disk_read - start.disk_read), times * (stop.disk_write - start.disk_write)

    def announce(self, *, start: Counted, stop: Counted, traced: int, left_out: int) -> None:
        """Adds the bytes in which a pipeline would announce the shapes of skipped micro-batches. It announces the `traced` ones between
        the two readings."""
        for comm, before, after in zip(self._mesh.comms, start.wire, stop.wire, strict=True):
            if announced := after.get("scalars", 0) - before.get("scalars", 0):
                comm.counters.bytes["scalars"] += announced // traced * left_out


def actions_of(intervals: Sequence[Interval], *, micro_batch: int) -> list[int]:
    """Positions in `intervals` of the actions of `micro_batch`."""
    return [number for number, interval in enumerate(intervals) if interval.action.micro_batch == micro_batch]


def seconds_of_actions(
    computes: Sequence[Action], *, intervals: Sequence[Interval], middle: int, traced: int, count: int
) -> dict[Action, float]:
    """Seconds of all actions of a rank in a step of `count` micro-batches, after a trace of `traced` micro-batches. middle: the one that
    stands for those that were skipped."""
    known = {interval.action: interval.stop - interval.start for interval in intervals}
    return {action: known[_like(action, middle=middle, traced=traced, count=count)] for action in computes}


def _like(action: Action, *, middle: int, traced: int, count: int) -> Action:
    """The traced action that stands for `action`."""
    number = action.micro_batch
    last = traced - 1 - middle  # micro-batches after the middle one
    like = traced - (count - number) if number >= count - last else min(number, middle)
    return Action(kind=action.kind, stage=action.stage, micro_batch=like)
