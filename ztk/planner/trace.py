"""One rank of a plan: the real `parallelize` and two real steps over tensors without values."""

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ztk.core.policies.hardware import Hardware
from ztk.core.policies.peers import Peer
from ztk.core.policies.pipeline import PipelinePolicy, ScheduleName
from ztk.core.runtime import Mesh, Process, Tier, Topology
from ztk.core.runtime.comm import Comm
from ztk.core.runtime.comm.planned import Letters, PlannedComm
from ztk.core.runtime.io import Direction, IoCounters
from ztk.core.runtime.mesh import AXES
from ztk.core.runtime.planned import PLANNED
from ztk.core.runtime.process import all_replicas
from ztk.parallel.apply import parallelize
from ztk.parallel.pipeline import Action, Interval, make_schedule
from ztk.parallel.recompute import selective
from ztk.planner.attention_costs import fused_attention
from ztk.planner.kinds import GRADIENT, INTERCEPTED, REQUEST
from ztk.planner.lanes import Lanes, Mark, StepTime
from ztk.planner.peer import as_peer
from ztk.planner.pipeline import StageTimes
from ztk.planner.tracker import Peak, StepTracker, is_work
from ztk.train.engine import Engine
from ztk.train.engine.pipeline import PipelineEngine
from ztk.zero.buckets.residency import ParameterState, Residency
from ztk.zero.offload.planned import PlannedIo
from ztk.zero.reduction import GradientReduction
from ztk.zero.update import update
from ztk.zero.update.update import ShardUpdate

# Traces a few micro-batches of a long step, and adds the counts of a middle one for every micro-batch that is skipped.
#
# Only the first and the last micro-batch of a step differ from the others: no backward has prefetched the gathers of the first, and the
# gradients of the last are reduced. Schedules that keep all micro-batches alive are traced completely.

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


STEPS = 2  # the first records the order in which stage 3 gathers, the second prefetches along it


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTrace:
    """Memory and traffic of one rank, in bytes.

    state: bytes by tier and category, between two steps. reserved: the largest sum booked at one time, by tier. peak: the device's, with
    activations. saved: bytes that the first micro-batch's forward leaves on the device for its backward; 0 for a pipeline, whose schedule
    mixes forwards and backwards. wire: bytes by axis and kind, in one step.
    disk_read, disk_write: bytes in one step. flops: operations of one step. time: duration of one step; None without hardware.
    stages: times of a pipeline rank's actions, in its own time.
    The wire, the disk, the operations and the time are from the last step.
    """

    rank: int
    state: dict[str, dict[str, int]]
    reserved: dict[str, int]
    peak: Peak
    saved: int
    wire: dict[str, dict[str, int]]
    disk_read: int
    disk_write: int
    flops: int
    time: StepTime | None
    stages: StageTimes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedProcess(Process):
    """A rank whose device computes nothing and whose collectives move nothing. lanes: the timeline, or None if time is not planned.
    letters: see `Letters`."""

    lanes: Lanes | None = None
    letters: Letters | None = None

    @staticmethod
    def of(
        rank: int,
        *,
        world_size: int,
        topology: Topology,
        ranks_per_node: int,
        lanes: Lanes | None = None,
        letters: Letters | None = None,
    ) -> Process:
        """Rank `rank` of `world_size`, arranged. letters: messages of its pipeline's ranks. Raises ValueError if the degrees do not fit the
        world."""
        comm = _connect(rank, members=tuple(range(world_size)), ranks_per_node=ranks_per_node, lanes=lanes)
        process = PlannedProcess(
            rank=rank,
            local_rank=rank % ranks_per_node,
            world_size=world_size,
            local_world_size=min(ranks_per_node, world_size),
            device=PLANNED,
            comm=comm,
            mesh=all_replicas(comm),
            timeout_seconds=1.0,
            lanes=lanes,
            letters=letters,
        )
        return process.arrange(topology)

    def connect(self, groups: Sequence[Sequence[int]]) -> Comm:
        own = next(group for group in groups if self.rank in group)
        return _connect(
            self.rank, members=own, ranks_per_node=self.local_world_size, lanes=self.lanes, letters=self.letters
        )


def _connect(
    rank: int,
    *,
    members: tuple[int, ...],
    ranks_per_node: int,
    lanes: Lanes | None,
    letters: Letters | None = None,
) -> Comm:
    in_node = sum(member // ranks_per_node == rank // ranks_per_node for member in members)
    moved = None if lanes is None else lanes.collective(size=len(members), in_node=in_node)
    return PlannedComm(rank=members.index(rank), size=len(members), moved=moved, letters=letters)


def trace_rank(
    build: Callable[[], nn.Module],
    *,
    batch: Any,
    rank: int,
    world_size: int,
    topology: Topology,
    ranks_per_node: int,
    accumulation_steps: int,
    policies: Mapping[str, Any],
    hardware: Hardware | None = None,
    peer: Peer | None = None,
    letters: Letters | None = None,
) -> RankTrace:
    """Traces one rank. build: makes the model, called with the meta device as default. batch: a micro-batch of planned tensors.

    policies: keywords of `parallelize`. letters: messages of earlier pipeline ranks.
    Raises ValueError for values that the policies refuse, and for a model that needs its tensors' values or returns no loss.
    """
    lanes = None if hardware is None else Lanes(hardware, peer=peer)
    with torch.device(PLANNED):
        model = build()
    process = PlannedProcess.of(
        rank,
        world_size=world_size,
        topology=topology,
        ranks_per_node=ranks_per_node,
        lanes=lanes,
        letters=letters,
    )
    tracker = StepTracker(device=PLANNED.type, computed=None if lanes is None else lanes.compute)
    traced = traced_micro_batches(accumulation_steps, stages=topology.pipeline, policy=policies["pipeline"])
    with tracker, fused_attention(), watched_host(lanes), as_peer(peer or Peer()), values_are_refused():
        engine = parallelize(
            model,
            process=process,
            accumulation_steps=traced,
            initial_values=_no_values,
            **policies,
        )
        tracker.ledger = engine.memory
        tracker.watch(model)
        try:
            return _run_steps(engine, batch=batch, tracker=tracker, lanes=lanes, micro_batches=accumulation_steps)
        finally:
            tracker.unwatch()
            engine.close()
            gc.collect()


def _run_steps(
    engine: Engine, *, batch: Any, tracker: StepTracker, lanes: Lanes | None, micro_batches: int
) -> RankTrace:
    """Runs STEPS steps of the engine's micro-batches, and extends the counts of the last one to `micro_batches`."""
    peaks, saved, stages = [], 0, None
    repeater = Repeater(mesh=engine.process.mesh, io=engine.io, tracker=tracker, lanes=lanes)
    left_out = micro_batches - engine.accumulation_steps
    for _ in range(STEPS):
        tracker.restart()
        engine.process.mesh.counters.reset()
        started = engine.io.read_bytes, engine.io.write_bytes
        if lanes is not None:
            lanes.restart()
        if isinstance(engine, PipelineEngine):
            middle, stages = _run_pipeline(engine, batch=batch, repeater=repeater, micro_batches=micro_batches)
        else:
            middle, saved = _run_micro_batches(engine, batch=batch, tracker=tracker, repeater=repeater)
        peaks.append(tracker.peak)
    repeated = [repeater.repeat(start=start, stop=stop, times=left_out) for start, stop in middle] if left_out else []
    ended = engine.io.read_bytes, engine.io.write_bytes
    read, write = (
        now - before + sum(more[way] for more in repeated)
        for way, (now, before) in enumerate(zip(ended, started, strict=True))
    )
    disk = {"disk_read": read, "disk_write": write}
    return RankTrace(
        rank=engine.process.rank,
        state={tier.label: engine.memory.by_category(tier) for tier in Tier},
        reserved={tier.label: engine.memory.peak(tier) for tier in Tier},
        peak=max(peaks, key=lambda peak: peak.nbytes),
        saved=saved,
        wire=wire_by_axis(engine.process.mesh),
        **disk,
        flops=tracker.flops,
        time=None if lanes is None else lanes.read(**disk),
        stages=stages,
    )


def _run_micro_batches(
    engine: Engine, *, batch: Any, tracker: StepTracker, repeater: Repeater
) -> tuple[list[tuple[Counted, Counted]], int]:
    """Runs one step. Returns the readings before and after its fourth micro-batch, and the bytes that the first one's forward saves.

    The first gathers of a step may delay the second and the third micro-batch.
    """
    saved, readings = 0, []
    for micro_batch in range(engine.accumulation_steps):
        loss = _forward(engine, batch=batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                "the model's forward returns no scalar, and a plan needs the loss: wrap the model in one that returns it"
            )
        if micro_batch == 0:
            saved = tracker.alive - engine.memory.current(Tier.device)
        engine.backward(loss)
        del loss
        engine.step()
        readings.append(repeater.read())
    return list(itertools.pairwise(readings[2:4])), saved


def _run_pipeline(
    engine: PipelineEngine, *, batch: Any, repeater: Repeater, micro_batches: int
) -> tuple[list[tuple[Counted, Counted]], StageTimes | None]:
    """Runs one step. Returns the readings around each action of a middle micro-batch and, if there is a clock, the times of a step with
    `micro_batches`."""
    readings: list[Counted] = []

    def now() -> float:
        readings.append(repeater.read())
        clock = readings[-1].clock
        return 0.0 if clock is None else clock.now

    engine.record_timeline, engine.now = True, now
    started = now()
    arguments = batch if isinstance(batch, Mapping | tuple) else (batch,)
    traced = engine.accumulation_steps
    engine.train_batch([arguments] * traced)
    assert engine.timeline is not None
    repeater.announce(start=readings[0], stop=readings[1], traced=traced, left_out=micro_batches - traced)
    intervals, starts = engine.timeline.intervals, readings[1::2]
    number = middle_micro_batch(traced, stages=len(engine.schedule.ranks), policy=engine.policy)
    middle = [(starts[at], starts[at + 1]) for at in actions_of(intervals, micro_batch=number) if at + 1 < len(starts)]
    if repeater.lanes is None:
        return middle, None
    schedule = make_schedule(
        engine.policy.schedule,
        num_ranks=len(engine.schedule.ranks),
        num_micro_batches=micro_batches,
        virtual_stages=engine.policy.virtual_stages,
    )
    return middle, StageTimes(
        schedule=schedule,
        seconds=seconds_of_actions(
            schedule.computes(engine.process.mesh.comm("pp").rank),
            intervals=intervals,
            middle=number,
            traced=traced,
            count=micro_batches,
        ),
        outside=repeater.lanes.now - started - (intervals[-1].stop - intervals[0].start),
        transfer=repeater.lanes.transfer,
    )


def _forward(engine: Engine, *, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        return engine(**batch)
    return engine(*batch) if isinstance(batch, tuple | list) else engine(batch)


def wire_by_axis(mesh: Mesh) -> dict[str, dict[str, int]]:
    """Counted bytes by axis and kind, without zeros. A connection that several axes share is counted under the first."""
    named = {}
    for axis in AXES:
        named.setdefault(mesh.comm(axis), axis)
    return {
        axis: moved
        for comm in mesh.comms
        if (moved := {kind: nbytes for kind, nbytes in comm.counters.bytes.items() if nbytes})
        and (axis := named.get(comm, "world"))
    }


def planned(batch: Any) -> Any:
    """`batch` with tensors of the same shapes and dtypes without values."""

    def without_values(value: Any) -> Any:
        return torch.empty_like(value, device=PLANNED) if isinstance(value, Tensor) else value

    return tree_map(without_values, batch)


def _no_values(*, name: str, start: int, stop: int) -> Tensor:
    return torch.empty(stop - start, dtype=torch.float32, device=PLANNED)


@contextlib.contextmanager
def values_are_refused():
    """Turns errors of the meta device into a ValueError with the reason."""
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        text = str(error)
        if "meta" not in text.lower():
            raise
        raise ValueError(
            f"the model or one of its policies reads values of tensors, and a plan has none ({text.splitlines()[0]}): plan the layout "
            "with a model whose shapes do not depend on values"
        ) from error


# Work of the host in a planned step that is not an operation.
#
# On a CPU, Python takes time from computing when it accepts a gradient, sends a request to the disk, or decides about an operation of a
# recomputed block. With a GPU, an update in main memory delays the next use of its parameters: the step waits for the host, or the gather of
# a bucket does. The functions that do this are wrapped.


@contextmanager
def watched_host(lanes: Lanes | None) -> Iterator[None]:
    """Context in which the clock of `lanes` includes this work. If None, there is no clock."""
    if lanes is None:
        yield
        return
    accept, request, choose = GradientReduction.accept, PlannedIo.request, selective.choose
    run, update_behind = ShardUpdate.run, ShardUpdate._update_behind
    start_gather, finish_work = Residency.start_gather, Residency._finish_work

    def accepted(reduction: GradientReduction, *args: Any, **kwargs: Any) -> None:
        lanes.host_work(GRADIENT)
        accept(reduction, *args, **kwargs)

    def requested(io: PlannedIo, direction: Direction, *, nbytes: int, **kwargs: Any) -> None:
        lanes.host_work(REQUEST, amount=nbytes)
        if direction is Direction.read:
            lanes.disk_reads(nbytes)
        request(io, direction, nbytes=nbytes, **kwargs)

    def chosen(ctx: object, func: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> object:
        if is_work(func):
            dtype = next((value.dtype for value in args if isinstance(value, Tensor)), torch.float32)
            lanes.host_work(INTERCEPTED, dtype=dtype)
        return choose(ctx, func, *args, **kwargs)

    def ran(shards: ShardUpdate, *args: Any, **kwargs: Any) -> None:
        run(shards, *args, **kwargs)
        lanes.wait_until(
            lanes.loaded, lane="pcie"
        )  # parameters that are full on every rank, unless a gather waited for them

    def updated_behind(shards: ShardUpdate, *args: Any, **kwargs: Any) -> None:
        with lanes.behind():
            update_behind(shards, *args, **kwargs)

    fetched: dict[Residency, float] = {}

    def started_gather(residency: Residency, *, is_exact: bool = False) -> None:
        starts = residency.state is ParameterState.sharded
        start_gather(residency, is_exact=is_exact)
        if starts:
            fetched[residency] = lanes.loaded

    def finished_work(residency: Residency) -> None:
        before = lanes.loaded
        finish_work(residency)
        own = lanes.loaded if lanes.loaded > before else fetched.pop(residency, 0.0)
        lanes.wait_until(own, lane="pcie")

    class Updated(Future):
        """Done at a time of the clock."""

        def done(self) -> bool:
            return super().done() and super().result() <= lanes.now

        def set_result(self, result: object) -> None:
            super().set_result(lanes.updated())

        def result(self, timeout: float | None = None) -> None:
            lanes.wait_until(super().result(timeout), lane="host")

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(update, "Future", Updated))
        stack.enter_context(mock.patch.object(ShardUpdate, "run", ran))
        stack.enter_context(mock.patch.object(ShardUpdate, "_update_behind", updated_behind))
        stack.enter_context(mock.patch.object(Residency, "start_gather", started_gather))
        stack.enter_context(mock.patch.object(Residency, "_finish_work", finished_work))
        stack.enter_context(mock.patch.object(GradientReduction, "accept", accepted))
        stack.enter_context(mock.patch.object(PlannedIo, "request", requested))
        stack.enter_context(mock.patch.object(selective, "choose", chosen))
        yield
