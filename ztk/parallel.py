"""The one place where techniques meet. Order: pipeline stages, tensors, sequences, experts, groups of parameters, stores, ZeRO,
recomputation, engine.

A technique is applied to a plain module from outside; the module, the optimizer and the training program know nothing of it.
"""

import functools
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ztk.engine.control import StepControl
from ztk.engine.engine import Engine
from ztk.engine.parts import warn_of_parts
from ztk.engine.pipeline import PipelineEngine
from ztk.moe import metrics_of_experts, scale_router_losses, shard_experts
from ztk.nn.deferred import DeferredGradients
from ztk.nn.linear import WIDENED, speed_up_linear_layers
from ztk.offload import HostStore, NvmeStore, OffloadPolicy, OffloadTarget
from ztk.offload.policy import PAGE_BYTES
from ztk.optim import FlatOptimizer, OptimizerPolicy, flat_optimizer, group_parameters
from ztk.pipeline import PipelineModule, PipelinePolicy, ScheduleName
from ztk.pipeline.stages import layered, mark_copies, share_values, split
from ztk.precision import PrecisionPolicy
from ztk.recompute import RecomputePolicy, recompute_blocks
from ztk.runtime import MemoryLedger, PhaseClock, Process
from ztk.runtime.host_memory import keep_freed_memory
from ztk.runtime.io import IoCounters
from ztk.runtime.part import InitialValues, Part, values_of_parts
from ztk.sequence import cut_sequences
from ztk.tensor import TensorPolicy, shard_tensors
from ztk.zero import DeviceStore, Store, Stores, Zero, ZeroPolicy
from ztk.zero.layout import PARAMETER_ALIGNMENT, SHARD_ALIGNMENT
from ztk.zero.units import plan_units


def parallelize(
    model: nn.Module,
    *,
    process: Process,
    optimizer: OptimizerPolicy,
    lr_table: Tensor | None = None,
    precision: PrecisionPolicy | None = None,
    zero: ZeroPolicy | None = None,
    offload: OffloadPolicy | None = None,
    tensor: TensorPolicy | None = None,
    experts: str | None = None,
    recompute: RecomputePolicy | None = None,
    pipeline: PipelinePolicy | None = None,
    parts: Mapping[str, Part] | None = None,
    accumulation_steps: int = 1,
    initial_values: InitialValues | None = None,
    fast_linear: bool = False,
    sample_batch: object | None = None,
) -> Engine:
    """Makes `model` train under a memory strategy on the mesh of `process`. A collective call: every rank makes it with the same
    arguments.

    model: a plain module, on any device; on the meta device it needs `initial_values(name=, start=, stop=)`, otherwise rank 0's values
        are everybody's. Its parameters are taken over: dtype, memory and place follow the policies.
    fast_linear: on CPU torch's own linear layers in `model` multiply float32 by `ztk.nn.linear`, as the native decoder's do: up to twice as
        fast, by processor, and rounded otherwise than plain torch. 16-bit types that the processor cannot multiply go that way always.
    experts: a regular expression for the layers whose experts are spread over the mesh's expert axis; None: all that have some.
    pipeline: how a mesh with several stages cuts and runs the model, which is then a `ztk.pipeline.PipelineModule` or the native decoder;
        the engine is a `PipelineEngine`. sample_batch: a micro-batch to measure layers with, for partition="profile".
    parts: of a model whose tensors are cut over the mesh's tensor-parallel ranks already; None: they are cut here.
    lr_table: fp32 [steps], multipliers of the learning rate by number of updates; the last one stays. None: constant.

    Raises ValueError for policies that do not fit together.
    """
    precision, zero, offload = precision or PrecisionPolicy(), zero or ZeroPolicy(), offload or OffloadPolicy()
    mesh = process.mesh
    if process.device.type == "cpu":
        keep_freed_memory()
        if fast_linear or precision.dtype in WIDENED:
            speed_up_linear_layers(model)
    elif fast_linear:
        raise ValueError(f"fast_linear=True has no effect on {process.device}: leave it out")
    if offload.parameters is not OffloadTarget.none and not zero.shards_parameters:
        raise ValueError(
            f"offload.parameters={offload.parameters} needs zero=stage3 (have stage {zero.stage}); "
            "use zero=stage3 or offload.parameters=none"
        )
    recompute = recompute or RecomputePolicy()
    if recompute.partition_inputs and tensor is not None and tensor.sequence_parallel:
        raise ValueError(
            "recompute.partition_inputs=true needs blocks whose input is the same on all tensor-parallel ranks; with "
            "topology.sequence_parallel=true each has its own part already: leave partition_inputs out"
        )
    if zero.hpz_partition_size not in (1, mesh.topology.intra_node):
        raise ValueError(
            f"zero.hpz_partition_size={zero.hpz_partition_size}: arrange the process with Topology(intra_node={zero.hpz_partition_size})"
        )
    memory, clock, io = MemoryLedger(), PhaseClock(), IoCounters()
    step = flat_optimizer(optimizer)
    if accumulation_steps > 1 and precision.reduce_dtype is None:
        # Sums of many micro-batches stagnate in 16 bits: 512 equal bf16 gradients add up to three quarters of their sum.
        precision = replace(precision, reduce_dtype=torch.float32)
    if isinstance(model, PipelineModule) and mesh.comm("pp").size == 1:
        model.build()
    stages = None
    trained = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}  # of the whole model
    if mesh.comm("pp").size > 1:
        pipeline = pipeline or PipelinePolicy()
        pipeline.check(num_ranks=mesh.comm("pp").size, num_micro_batches=accumulation_steps)
        layers = layered(model)
        trained = layers.shapes()
        stages = getattr(model, "stages", None) or split(layers, policy=pipeline, mesh=mesh, sample_batch=sample_batch)
    if not trained and optimizer.lr > 0:  # lr=0: a model that shall only run forward, its parameters frozen
        raise ValueError("no parameter of the model requires gradients: there is nothing to train")
    is_cut, parts = parts is not None, dict(parts or {})
    tensors, deferred = None, DeferredGradients()
    if stages is not None and pipeline.schedule is ScheduleName.zero_bubble:
        deferred.attach(model)
    if mesh.comm("tp").size > 1 and not is_cut:
        tensors = shard_tensors(model, mesh=mesh, policy=tensor or TensorPolicy())
        parts |= tensors.parts
    cuts_tokens = tensor is not None and tensor.sequence_parallel
    if mesh.comm("sp").size > 1:
        cut_sequences(model, mesh=mesh, tokens_cut_along_tp=cuts_tokens)
    parts |= shard_experts(model, mesh=mesh, pattern=experts, tokens_cut_along_tp=cuts_tokens)
    if stages is not None:
        share_values(stages, comm=mesh.comm("pp"))
        parts = mark_copies(parts, stages=stages, comm=mesh.comm("pp"))
    if initial_values is not None:
        initial_values = values_of_parts(initial_values, parts=parts)
    groups = group_parameters(optimizer, shapes=trained)
    offload = _fitted(offload, model=model, process=process, parts=parts, optimizer=step)
    stores = _stores(offload, process=process, memory=memory, io=io, shards_gradients=zero.shards_gradients)
    sharded = Zero(
        model,
        policy=zero,
        precision=precision,
        optimizer=step,
        groups=groups,
        stores=stores,
        mesh=mesh,
        parts=parts,
        ledger=memory,
        clock=clock,
        piece_size=_piece_size(offload, optimizer=step),
        initial_values=initial_values,
    )
    if tensors is not None:
        tensors.sum_partial_gradients(model)
    recompute_blocks(model, policy=recompute, comm=mesh.comm("tp"), ledger=memory)
    _place_buffers(model, process=process)
    warn_of_parts(model, zero=sharded, is_cut=max(mesh.comm(axis).size for axis in ("pp", "tp", "ep")) > 1)
    control = StepControl(
        optimizer=optimizer,
        groups=groups,
        loss_scale=precision.loss_scale,
        lr_table=lr_table,
        gradient_divisor=mesh.comm("data").size * accumulation_steps,
        device=process.device,
    )
    scale_router_losses(model, loss_scale=control.loss_scale)
    mesh.counters.reset()  # what building moved is not what training moves
    kind = (
        Engine
        if stages is None
        else functools.partial(PipelineEngine, stages=stages, policy=pipeline, deferred=deferred)
    )
    return kind(
        model,
        zero=sharded,
        control=control,
        process=process,
        memory=memory,
        clock=clock,
        io=io,
        accumulation_steps=accumulation_steps,
        module_metrics=metrics_of_experts(model, mesh=mesh),
    )


def _stores(
    policy: OffloadPolicy, *, process: Process, memory: MemoryLedger, io: IoCounters, shards_gradients: bool
) -> Stores:
    """One store per tier in use. Reduced gradients sleep where the optimizer runs."""
    made: dict[OffloadTarget, Store] = {}

    def store(target: OffloadTarget) -> Store:
        if target not in made:
            match target:
                case OffloadTarget.none:
                    made[target] = DeviceStore(device=process.device, ledger=memory)
                case OffloadTarget.cpu:
                    made[target] = HostStore(policy, ledger=memory)
                case OffloadTarget.nvme:
                    made[target] = NvmeStore(policy, rank=process.rank, ledger=memory, counters=io)
        return made[target]

    return Stores(
        optimizer=store(policy.optimizer),
        gradients=store(policy.optimizer if shards_gradients else OffloadTarget.none),
        parameters=store(policy.parameters),
    )


def _fitted(
    policy: OffloadPolicy,
    *,
    model: nn.Module,
    process: Process,
    parts: Mapping[str, Part],
    optimizer: FlatOptimizer,
) -> OffloadPolicy:
    """Pool buffers no larger than the largest unit's shard needs: a small model does not reserve what a large one would use."""
    if policy.optimizer is not OffloadTarget.nvme:
        return policy

    def shard(name: str, parameter: nn.Parameter) -> int:
        axis = parts[name].axis if name in parts else "data"
        return -(-parameter.numel() // process.mesh.comm(axis).size)

    sizes = {name: shard(name, parameter) for name, parameter in model.named_parameters()}
    largest = max(sum(sizes[name] for name in unit.owned) for unit in plan_units(model))
    elements = largest + SHARD_ALIGNMENT * PARAMETER_ALIGNMENT  # with room for padding
    needed = -(-elements * _bytes_per_element(optimizer) // PAGE_BYTES) * PAGE_BYTES
    return replace(policy, buffer_bytes=min(policy.buffer_bytes, needed))


def _bytes_per_element(optimizer: FlatOptimizer) -> int:
    """Master weight and moments, fp32."""
    return 4 * (1 + len(optimizer.state_names))


def _piece_size(policy: OffloadPolicy, *, optimizer: FlatOptimizer) -> int | None:
    """How many elements fit a pool buffer with master weights and moments in fp32, or None: no limit."""
    if policy.optimizer is not OffloadTarget.nvme:
        return None  # parameter shards alone stream through the store's blocks, whatever their size
    bytes_per_element = _bytes_per_element(optimizer)
    size = policy.buffer_bytes // bytes_per_element // SHARD_ALIGNMENT * SHARD_ALIGNMENT
    if size == 0:
        raise ValueError(
            f"offload.buffer_bytes={policy.buffer_bytes} cannot hold the states of {SHARD_ALIGNMENT} parameters; "
            f"set offload.buffer_bytes={SHARD_ALIGNMENT * bytes_per_element} or more"
        )
    return size


def _place_buffers(model: nn.Module, *, process: Process) -> None:
    """Buffers go to the device, with rank 0's values. Those on the meta device are the model's to fill: `materialise_buffers(device)`."""
    device = process.device
    if any(buffer.is_meta for buffer in model.buffers()):
        if not hasattr(model, "materialise_buffers"):
            raise ValueError("the model has buffers on the meta device and no materialise_buffers(device) to fill them")
        model.materialise_buffers(device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer = buffer.to(device).contiguous()
                process.mesh.comm("data").broadcast(buffer, source=0, label=name).wait()
