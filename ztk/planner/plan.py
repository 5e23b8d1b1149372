"""`ztk.plan`: memory, traffic and time of a run before it starts."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ztk.core.policies.ema import EmaPolicy
from ztk.core.policies.hardware import Hardware
from ztk.core.policies.peers import Peer
from ztk.core.policies.ranges import refuse
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import PrecisionPolicy
from ztk.core.runtime import Topology
from ztk.core.runtime.comm.planned import Letters
from ztk.core.runtime.planned import PLANNED
from ztk.optim import OptimizerPolicy
from ztk.parallel.pipeline import PipelineModule, PipelinePolicy
from ztk.parallel.recompute import RecomputePolicy
from ztk.parallel.tensor import TensorPolicy
from ztk.planner.pipeline import joined
from ztk.planner.result import Plan
from ztk.planner.trace import RankTrace, planned, trace_rank
from ztk.zero.offload import OffloadPolicy

RANKS_PER_NODE = 8  # default without hardware


def plan(
    build: Callable[[], nn.Module],
    *,
    batch: Any,
    world_size: int,
    optimizer: OptimizerPolicy | None = None,
    precision: PrecisionPolicy | None = None,
    zero: ZeroPolicy | None = None,
    offload: OffloadPolicy | None = None,
    tensor: TensorPolicy | None = None,
    recompute: RecomputePolicy | None = None,
    topology: Topology | None = None,
    pipeline: PipelinePolicy | None = None,
    ema: EmaPolicy | None = None,
    experts: str | None = None,
    accumulation_steps: int = 1,
    hardware: Hardware | None = None,
    peer: Peer | None = None,
) -> Plan:
    """Runs `parallelize` and two steps of every kind of rank on tensors without values: for any world size, on any machine.

    The plan is for GPUs: it takes the paths of `parallelize` for a device that is no CPU. Its numbers equal the counters of a real run. The
    peak counts results of operations, without the allocator's rounding and a kernel's internal memory.

    build: returns the model, whose forward returns its loss; called with torch's meta device as default. batch: one rank's micro-batch, the
    arguments of that forward: a tuple, or a dict of keywords; only shapes and dtypes of its tensors matter. hardware: if omitted, the plan
    has no seconds and does not check memory.

    peer: another library's way to run the step. Defaults to ztk's own.

    Every stage of a pipeline is traced. Experts are planned with equal loads: each expert gets the same number of rows.

    Raises ValueError for policies that do not fit together or do not fit the model, for float8 products on hardware without them, and for a
    model that reads its tensors' values.
    """
    topology, recompute, pipeline = topology or Topology(), recompute or RecomputePolicy(), pipeline or PipelinePolicy()
    offload = offload or OffloadPolicy()
    refuse(_without_rate(precision, hardware=hardware))
    policies = {
        "optimizer": optimizer or OptimizerPolicy(),
        "precision": precision,
        "zero": zero,
        "offload": replace(offload, nvme_path=offload.nvme_path or "."),
        "tensor": tensor,
        "recompute": recompute,
        "pipeline": pipeline,
        "ema": ema,
        "experts": experts,
    }
    with torch.device(PLANNED):
        parameters = full_size(build())
    classes: list[RankTrace] = []
    for ranks in kinds_of_ranks(topology, world_size=world_size):
        letters = Letters()
        traces = [
            trace_rank(
                build,
                batch=planned(batch),
                rank=rank,
                world_size=world_size,
                topology=topology,
                ranks_per_node=RANKS_PER_NODE if hardware is None else hardware.ranks_per_node,
                hardware=hardware,
                peer=peer,
                accumulation_steps=accumulation_steps,
                policies=policies,
                letters=letters,
            )
            for rank in ranks
        ]
        letters.check()
        for trace in _together(traces):
            if not any(replace(trace, rank=other.rank) == other for other in classes):
                classes.append(trace)
    return Plan(
        world_size=world_size, topology=topology, parameters=parameters, classes=tuple(classes), hardware=hardware
    )


def _without_rate(precision: PrecisionPolicy | None, *, hardware: Hardware | None) -> Iterator[str]:
    if precision is None or precision.float8 is None or hardware is None or hardware.curves is not None:
        return
    if hardware.fp8_rate is None:
        yield (
            f"precision.float8={precision.float8}: hardware={hardware.name} has no float8 products; use precision=bf16, or give "
            "hardware.fp8_rate"
        )


def full_size(model: nn.Module) -> int:
    """Number of elements of the full model's parameters."""
    if isinstance(model, PipelineModule):
        return sum(shape.numel() for shape in model.shapes().values())
    return sum(parameter.numel() for parameter in model.parameters())


def kinds_of_ranks(topology: Topology, *, world_size: int) -> list[list[int]]:
    """Lists of ranks, one for each kind of rank, in which the ranks of one pipeline are together, the first stage first.

    Data-parallel ranks have shards of one size, and so have ranks with other experts. Of the tensor-parallel ranks, the first may have one
    head more than the last. Every stage of a pipeline is a kind of its own.
    Raises ValueError if the degrees do not fit the world.
    """
    topology.replicas(world_size=world_size)
    per_stage = world_size // topology.pipeline
    return [
        [stage * per_stage + tensor for stage in range(topology.pipeline)]
        for tensor in sorted({0, topology.tensor - 1})
    ]


def _together(traces: list[RankTrace]) -> list[RankTrace]:
    """The ranks of one pipeline, including their waits for each other."""
    stages = [trace.stages for trace in traces if trace.stages is not None]
    times = [trace.time for trace in traces if trace.time is not None]
    if not stages:
        return traces
    return [
        replace(trace, time=time, stages=None) for trace, time in zip(traces, joined(times, stages=stages), strict=True)
    ]
