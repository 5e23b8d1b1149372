"""Arguments of `parallelize`, and intermediate results of the techniques applied so far."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ztk.core.policies import layout
from ztk.core.policies.compact import compact_faults
from ztk.core.policies.ema import EmaPolicy
from ztk.core.policies.ranges import refuse
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import PrecisionPolicy
from ztk.core.runtime import MemoryLedger, Mesh, PhaseClock, Process
from ztk.core.runtime.io import IoCounters
from ztk.core.runtime.part import InitialValues, Part
from ztk.nn.deferred import DeferredGradients
from ztk.optim import FlatOptimizer, OptimizerPolicy, TorchStep, WholeStep
from ztk.optim.states import StateFormat
from ztk.parallel.pipeline import PipelinePolicy
from ztk.parallel.pipeline.stages import Stages
from ztk.parallel.recompute import RecomputePolicy
from ztk.parallel.tensor import TensorPolicy
from ztk.parallel.tensor.shard import ShardedTensors
from ztk.parallel.tensor.tensor_plan import TensorPlan
from ztk.zero.buckets.context import stored_states
from ztk.zero.offload import OffloadPolicy
from ztk.zero.zero import Zero


@dataclass(kw_only=True)
class Plan:
    """One call of `parallelize`, which documents the fields up to `ema`; here every field has a value.

    trained: shapes of the full model's parameters that require gradients, by name, before anything is cut.
    float8: names of weights that float8 products read.
    parts: this rank's box of the full parameter, by name. Parameters without an entry are full.
    tensors: result of `apply_tensor`, or None. stages: this rank's pipeline stages, or None. sharded: ZeRO over the model.
    full_tensors: the tensor plan of the full model if this rank has stages of it, or None.
    """

    model: nn.Module
    process: Process
    optimizer: OptimizerPolicy
    flat_optimizer: FlatOptimizer | TorchStep | WholeStep
    lr_table: Tensor | None
    precision: PrecisionPolicy
    zero: ZeroPolicy
    offload: OffloadPolicy
    tensor: TensorPolicy
    recompute: RecomputePolicy
    pipeline: PipelinePolicy
    experts: str | None
    accumulation_steps: int
    initial_values: InitialValues | None
    ema: EmaPolicy | None = None
    trained: Mapping[str, torch.Size] = field(default_factory=dict)
    float8: frozenset[str] = frozenset()
    parts: dict[str, Part] = field(default_factory=dict)
    tensors: ShardedTensors | None = None
    full_tensors: TensorPlan | None = None
    stages: Stages | None = None
    sharded: Zero | None = None
    deferred: DeferredGradients = field(default_factory=DeferredGradients)
    memory: MemoryLedger = field(default_factory=MemoryLedger)
    clock: PhaseClock = field(default_factory=PhaseClock)
    io: IoCounters = field(default_factory=IoCounters)

    def __post_init__(self) -> None:
        """Raises ValueError for policies that do not fit together."""
        refuse(layout.offload_faults(self.offload, zero=self.zero))
        refuse(
            layout.recompute_faults(
                partition_inputs=self.recompute.partition_inputs, sequence_parallel=self.tensor.sequence_parallel
            )
        )
        refuse(layout.hpz_topology_faults(self.zero.hpz_partition_size, intra_node=self.mesh.topology.intra_node))
        if self.accumulation_steps > 1 and self.precision.reduce_dtype is None:
            # Sums of many micro-batches stagnate in 16 bits: 512 equal bf16 gradients add up to three quarters of their sum.
            self.precision = replace(self.precision, reduce_dtype=torch.float32)

    @property
    def mesh(self) -> Mesh:
        """The mesh of `process`."""
        return self.process.mesh

    @property
    def state_format(self) -> StateFormat:
        """See `stored_states`."""
        return stored_states(self.flat_optimizer, with_average=self.ema is not None and not self.has_average_apart)

    @property
    def has_average_apart(self) -> bool:
        """Whether the moving average of the weights is stored on another tier than some of the optimizer states."""
        if self.ema is None:
            return False
        chosen = self.ema.offload is not None and self.offload.optimizer_fraction < 1
        return chosen or self.ema.is_apart(optimizer=self.offload.optimizer)

    @property
    def is_cut(self) -> bool:
        """Whether some rank has less than the full model, before ZeRO."""
        return max(self.mesh.comm(axis).size for axis in ("pp", "tp", "ep")) > 1


def check_states(optimizer: OptimizerPolicy, *, precision: PrecisionPolicy, ema: EmaPolicy | None) -> None:
    """Raises ValueError if the formats of states, master weights and average cannot be combined."""
    if precision.bf16_master and ema is not None:
        raise ValueError(
            "ema: precision.bf16_master=true has no float32 master weights that a moving average could change places with: leave one of "
            "them out"
        )
    refuse(
        compact_faults(
            name=optimizer.name,
            states=optimizer.states,
            master=precision.master,
            dtype=precision.name,
            averages=ema is not None,
        )
    )
