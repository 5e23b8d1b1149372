"""One rank of a plan: the real `parallelize` and two real steps over tensors without values."""

import contextlib
import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ztk.core.policies.hardware import Hardware
from ztk.core.policies.peers import Peer
from ztk.core.runtime import Mesh, Process, Tier, Topology
from ztk.core.runtime.comm import Comm
from ztk.core.runtime.comm.planned import Letters, PlannedComm
from ztk.core.runtime.mesh import AXES
from ztk.core.runtime.planned import PLANNED
from ztk.core.runtime.process import all_replicas
from ztk.parallel.apply import parallelize
from ztk.parallel.pipeline import make_schedule
from ztk.planner.attention_costs import fused_attention
from ztk.planner.host_work import watched_host
from ztk.planner.lanes import Lanes, StepTime
from ztk.planner.peer import as_peer
from ztk.planner.pipeline import StageTimes
from ztk.planner.repeating import (
    Counted,
    Repeater,
    actions_of,
    middle_micro_batch,
    seconds_of_actions,
    traced_micro_batches,
)
from ztk.planner.tracker import Peak, StepTracker
from ztk.train.engine import Engine
from ztk.train.engine.pipeline import PipelineEngine

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
