"""`ztk.plan`: what a run needs and moves, before it starts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ztk.offload import OffloadPolicy
from ztk.optim import OptimizerPolicy
from ztk.planner.result import Plan
from ztk.planner.trace import RankTrace, planned, trace_rank
from ztk.policies.hardware import Hardware
from ztk.policies.plan import untraced
from ztk.policies.ranges import refuse
from ztk.precision import PrecisionPolicy
from ztk.recompute import RecomputePolicy
from ztk.runtime import Topology
from ztk.runtime.planned import PLANNED
from ztk.tensor import TensorPolicy
from ztk.zero import ZeroPolicy

RANKS_PER_NODE = 8  # without hardware


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
    accumulation_steps: int = 1,
    hardware: Hardware | None = None,
) -> Plan:
    """Runs `parallelize` and two steps of every kind of rank on tensors without values: for any world size, on any machine.

    The plan is that of GPUs: what `parallelize` does on a device that is no CPU. Its numbers are those of the counters of a run; the peak
    counts what operations return, not what the allocator adds by rounding, nor what a kernel uses inside.

    build: returns the model, whose forward returns its loss; called with torch's meta device as default. batch: one rank's micro-batch, the
    arguments of that forward: a tuple, or a dict of keywords; of its tensors only shapes and dtypes count. hardware: None: the plan has no
    answer about memory and no seconds.

    Raises ValueError for policies that do not fit together or do not fit the model, for pipeline stages, experts on several ranks and
    inputs of recomputed blocks on the CPU, which a plan does not trace, and for a model that reads its tensors' values.
    """
    topology, recompute = topology or Topology(), recompute or RecomputePolicy()
    refuse(untraced(pipeline=topology.pipeline, expert=topology.expert, inputs_on_cpu=recompute.inputs_on_cpu))
    policies = {
        "optimizer": optimizer or OptimizerPolicy(),
        "precision": precision,
        "zero": zero,
        "offload": offload and replace(offload, nvme_path=offload.nvme_path or "."),
        "tensor": tensor,
        "recompute": recompute,
    }
    with torch.device(PLANNED):
        parameters = sum(parameter.numel() for parameter in build().parameters())
    classes: list[RankTrace] = []
    for rank in kinds_of_ranks(topology):
        trace = trace_rank(
            build,
            batch=planned(batch),
            rank=rank,
            world_size=world_size,
            topology=topology,
            ranks_per_node=RANKS_PER_NODE if hardware is None else hardware.ranks_per_node,
            hardware=hardware,
            accumulation_steps=accumulation_steps,
            policies=policies,
        )
        if not any(replace(trace, rank=other.rank) == other for other in classes):
            classes.append(trace)
    return Plan(
        world_size=world_size, topology=topology, parameters=parameters, classes=tuple(classes), hardware=hardware
    )


def kinds_of_ranks(topology: Topology) -> tuple[int, ...]:
    """Ranks of which one is like any other rank: the data-parallel ones have shards of one size, of the tensor-parallel ones the first may
    have a head more than the last."""
    return tuple(sorted({0, topology.tensor - 1}))
