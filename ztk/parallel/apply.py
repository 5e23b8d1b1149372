"""`parallelize`: applies every technique to a plain module from outside, one after the other, over one `Plan`.

The module, the optimizer and the training program are independent of the techniques. The order is fixed: pipeline stages, tensors,
sequences, experts, ZeRO with its stores, recomputation, engine.
"""

import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ztk.core.policies.compact import master_of
from ztk.core.policies.ema import EmaPolicy
from ztk.core.policies.offload import MIN_BUFFER_COUNT, PAGE_BYTES
from ztk.core.policies.optimizer import TORCH
from ztk.core.policies.tier import Tier
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import PrecisionPolicy
from ztk.core.precision.float8 import device_fault
from ztk.core.runtime import Process, repeated
from ztk.core.runtime.host_memory import keep_freed_memory, return_freed_memory
from ztk.core.runtime.part import InitialValues, Part, values_of_parts
from ztk.core.runtime.planned import is_planned
from ztk.core.runtime.store import DeviceStore, Store, Stores
from ztk.nn.balance import scale_router_losses
from ztk.nn.float8 import check_parts, use_float8
from ztk.nn.linear import WIDENED, speed_up_linear_layers
from ztk.optim import (
    FlatOptimizer,
    GroupSchedule,
    GroupTable,
    OptimizerPolicy,
    TorchStep,
    WholeStep,
    flat_optimizer,
    group_parameters,
)
from ztk.optim.elementwise import is_elementwise
from ztk.optim.script_optimizer import FixedGroups, ScriptOptimizer, StateElsewhere
from ztk.optim.states import ROW_ALIGNMENT, StateFormat
from ztk.parallel.moe import metrics_of_experts, shard_experts
from ztk.parallel.parallel_plan import Plan, check_states
from ztk.parallel.pipeline import PipelineModule, PipelinePolicy, ScheduleName
from ztk.parallel.pipeline.stages import layered, mark_copies, share_values, split
from ztk.parallel.recompute import RecomputeMode, RecomputePolicy, recompute_blocks
from ztk.parallel.recompute.apply import blocks
from ztk.parallel.sequence import cut_sequences
from ztk.parallel.tensor import TensorPolicy, shard_tensors
from ztk.parallel.tensor.shard import full_plan
from ztk.train.engine.control import StepControl
from ztk.train.engine.engine import Engine
from ztk.train.engine.parts import warn_of_parts
from ztk.train.engine.pipeline import PipelineEngine
from ztk.zero.buckets.layout import PARAMETER_ALIGNMENT, SHARD_ALIGNMENT
from ztk.zero.buckets.units import plan_units
from ztk.zero.offload import HostStore, NvmeStore, OffloadPolicy
from ztk.zero.offload.planned import PlannedHostStore, PlannedNvmeStore
from ztk.zero.parameters.aliases import check_initialized
from ztk.zero.zero import Zero

_AGAIN = "close() the engine and call parallelize again"


def parallelize(
    model: nn.Module,
    *,
    process: Process,
    optimizer: OptimizerPolicy,
    torch_optimizer: torch.optim.Optimizer | None = None,
    elementwise: bool = False,
    lr_table: Tensor | None = None,
    group_schedule: GroupSchedule | None = None,
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
    model_divides_sequences: bool = False,
    gathers_outputs: bool = False,
    ema: EmaPolicy | None = None,
) -> Engine:
    """Makes `model` train under a memory strategy on the mesh of `process`. A collective call: every rank makes it with the same
    arguments.

    model: a plain module, on any device. On the meta device it needs `initial_values(name=, start=, stop=)`; otherwise every rank starts
        with rank 0's values. The engine takes its parameters over: dtype, memory and device follow the policies.
    torch_optimizer: with OptimizerPolicy(name="torch"), any optimizer over the model's parameters. Its own step runs, with the current
        options of its parameter groups: over this rank's shards if it is elementwise, else over full parameters, which every rank
        gathers for the step, with full states on every rank. Until the engine is closed, the object's own step, state_dict and
        load_state_dict raise, and its zero_grad drops the engine's gradients.
    elementwise: the torch_optimizer updates every element of a parameter from that element's weight, gradient and states alone. torch's own
        elementwise classes need no declaration (`ztk.optim.elementwise.TORCHS`), and the attribute `elementwise = True` is another one.
    lr_table: fp32 [steps], the multiplier of the learning rate for each update; after the last one it stays constant. If omitted, the rate
        is constant. [steps, 2] has the momentum (of Adam, LAMB and Lion the first of betas) in its second column.
    group_schedule: values of the torch_optimizer's groups for each update, instead of an lr_table.
    experts: a regular expression for the layers whose experts are distributed over the mesh's expert axis. Defaults to all layers with
    experts.
    pipeline: how a mesh with several stages cuts and runs the model, which is then a `ztk.parallel.pipeline.PipelineModule` or the native
        decoder. The engine is a `PipelineEngine`.
    parts: for a model that is already cut over the mesh's tensor-parallel ranks, its parts. If omitted, the model is cut here.
    accumulation_steps: micro-batches per step.
    fast_linear: on the CPU, torch's own linear layers in `model` multiply float32 by `ztk.nn.linear`, as in the native decoder: up to
        twice as fast, depending on the processor, with other rounding than plain torch. 16-bit types that the processor cannot multiply
        always use it.
    model_divides_sequences: the caller passes parts of sequences to the ranks of the mesh's sequence axis, and the model's layers exchange
        data; otherwise the native decoder is changed to do both.
    gathers_outputs: on a mesh with a sequence axis, forwards without targets also divide sequences, and every rank gets the outputs of full
        sequences, from which all of them must compute the same loss; otherwise such forwards compute full sequences on every rank.
    ema: keeps a moving average of the trained weights, for `engine.averaged()`, on the tier in the policy. If omitted, no average is kept.

    Raises:
        ValueError: for policies that do not fit together, or that do not fit the model or the mesh.
    """
    check_initialized(model)
    precision = precision or PrecisionPolicy()
    check_states(optimizer, precision=precision, ema=ema)
    plan = Plan(
        model=model,
        process=process,
        optimizer=optimizer,
        flat_optimizer=_step_of(
            torch_optimizer,
            policy=optimizer,
            model=model,
            elementwise=elementwise,
            lr_table=lr_table,
            schedule=group_schedule,
            devices=_devices_of_states(offload, process=process),
            precision=precision,
        ),
        lr_table=lr_table,
        precision=precision,
        zero=zero or ZeroPolicy(),
        offload=offload or OffloadPolicy(),
        tensor=tensor or TensorPolicy(),
        recompute=recompute or RecomputePolicy(),
        pipeline=pipeline or PipelinePolicy(),
        experts=experts,
        accumulation_steps=accumulation_steps,
        initial_values=initial_values,
        ema=ema,
    )
    _check_full_parameters(plan)
    apply_float8(plan)
    apply_fast_products(plan, fast_linear=fast_linear)
    apply_pipeline(plan, is_cut_by_caller=parts is not None)
    apply_tensor(plan, parts=parts)
    if not model_divides_sequences:
        apply_sequence(plan, gathers_outputs=gathers_outputs)
    apply_experts(plan)
    apply_copies(plan)
    groups = group_parameters(optimizer, shapes=plan.trained, tables=_embeddings(plan))
    _check_matrices(plan, groups=groups)
    apply_zero(plan, groups=groups)
    if process.device.type == "cpu":
        return_freed_memory()
    apply_recompute(plan)
    place_buffers(plan)
    warn_of_parts(model, zero=plan.sharded, is_cut=plan.is_cut)
    engine = build_engine(plan, groups=groups)
    if torch_optimizer is not None:
        engine.script_optimizer = _taken_over(torch_optimizer, engine=engine)
    return engine


def _taken_over(optimizer: torch.optim.Optimizer, *, engine: Engine) -> ScriptOptimizer:
    def zero_grad() -> None:
        if engine.zero.reduction.has_gradients:
            engine.discard_gradients()

    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    is_whole = isinstance(engine.zero.optimizer, WholeStep)
    return ScriptOptimizer(
        optimizer,
        groups=None if is_whole else FixedGroups(optimizer, names=names, build="parallelize", again=_AGAIN),
        state=StateElsewhere(
            way=f"ztk.checkpoint.save(engine, ...) and load keep them; to begin with new states {_AGAIN}",
            warn=warnings.warn if engine.process.rank == 0 else None,
        ),
        instead="the optimizer that was passed to parallelize: its states are the engine's, which ztk.checkpoint.save and load keep",
        zero_grad=zero_grad,
    )


def _devices_of_states(offload: OffloadPolicy | None, *, process: Process) -> list[torch.device]:
    """The devices on which the optimizer runs: this process's if some states stay there, the host if some are offloaded."""
    offload = offload or OffloadPolicy()
    stays = offload.optimizer is Tier.none or offload.optimizer_fraction < 1
    host = offload.optimizer is not Tier.none and offload.optimizer_fraction > 0
    return list(dict.fromkeys([*([process.device] if stays else []), *([torch.device("cpu")] if host else [])]))


def _step_of(
    given: torch.optim.Optimizer | None,
    *,
    policy: OptimizerPolicy,
    model: nn.Module,
    elementwise: bool,
    lr_table: Tensor | None,
    schedule: GroupSchedule | None,
    devices: Sequence[torch.device],
    precision: PrecisionPolicy,
) -> FlatOptimizer | TorchStep | WholeStep:
    """The update of `policy` with the master weights of `precision`, or the step of `given`."""
    if (given is None) != (policy.name != TORCH):
        raise ValueError(
            f"torch_optimizer requires optimizer=OptimizerPolicy(name={TORCH!r}), and this policy has the name {policy.name!r}: "
            "pass both or neither"
        )
    if given is None:
        made = flat_optimizer(policy, master=master_of(policy.states, master=precision.master))
        return made.rounded(states=precision.states_dtype) if precision.bf16_master else made
    if precision.bf16_master:
        raise ValueError(
            "precision.bf16_master=true (bf16.bf16_master_weights_and_grads of a ds_config) has no update with a torch optimizer, which "
            "steps float32 weights: use ztk's adamw, adam, lion or sgd, or leave it out"
        )
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if elementwise or is_elementwise(given):
        return TorchStep(given, parameters=trained, devices=devices, lr_table=lr_table, schedule=schedule)
    return WholeStep(given, parameters=trained, lr_table=lr_table, schedule=schedule)


def _check_full_parameters(plan: Plan) -> None:
    """Raises ValueError for an optimizer of full parameters where ranks hold parts of the model, and a closure with a changing loss
    scale."""
    step, topology = plan.flat_optimizer, plan.mesh.topology
    if not isinstance(step, WholeStep):
        return
    for axis in ("pipeline", "tensor", "expert"):
        if (degree := getattr(topology, axis)) > 1:
            raise ValueError(
                f"optimizer={step.name}: steps full parameters, and topology.{axis}={degree} divides the model over ranks: use "
                f"topology.{axis}=1, or declare it elementwise (optimizer.elementwise=true) if it updates every element by itself"
            )
    scale = plan.precision.loss_scale
    if step.needs_closure and scale is not None and scale.dynamic:
        raise ValueError(
            f"optimizer={step.name}: its step evaluates the loss again, which cannot skip a step with a dynamic loss scale: use "
            "precision=bf16 or fp32"
        )


def apply_float8(plan: Plan) -> None:
    """Makes linear layers multiply in float8 if the precision has a recipe.

    Raises ValueError for a device or a model without such products, and for gathers in another format.
    """
    recipe = plan.precision.float8
    if recipe is None:
        return
    if fault := device_fault(plan.process.device):
        raise ValueError(f"precision.float8={recipe}: {fault}; use precision=bf16")
    if plan.zero.quantized_weights or plan.zero.quantized_nontrainable_weights:
        raise ValueError(
            f"precision.float8={recipe} gathers weights in float8, and quantized_weights=True (or quantized_nontrainable_weights) of the "
            "ZeroPolicy as int8: leave it out, or use precision=bf16"
        )
    plan.float8 = use_float8(plan.model, recipe=recipe)


def apply_fast_products(plan: Plan, *, fast_linear: bool) -> None:
    """On the CPU: keeps freed memory, and makes linear layers use ztk's products if requested or required.

    Raises ValueError for `fast_linear` on another device.
    """
    device = plan.process.device
    if device.type == "cpu":
        keep_freed_memory()
        if fast_linear or plan.precision.dtype in WIDENED:
            speed_up_linear_layers(plan.model)
    elif fast_linear:
        raise ValueError(f"fast_linear=True has no effect on {device}: leave it out")


def apply_pipeline(plan: Plan, *, is_cut_by_caller: bool = False) -> None:
    """Keeps only this rank's stages in the model, and records which parameters of the full model train.

    A stage may have no block to recompute and no weight to cut, so both are looked for in the full model.
    Raises ValueError for a model that cannot be cut into stages, and for one with nothing to train.
    """
    model, comm = plan.model, plan.mesh.comm("pp")
    if isinstance(model, PipelineModule) and comm.size == 1:
        model.build()
    plan.trained = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    if comm.size > 1:
        plan.pipeline.check(num_ranks=comm.size, num_micro_batches=plan.accumulation_steps)
        layers = layered(model)
        plan.trained = layers.shapes()
        if plan.recompute.mode is not RecomputeMode.none:
            blocks(layers.whole(), policy=plan.recompute)
        if plan.mesh.comm("tp").size > 1 and not is_cut_by_caller:
            plan.full_tensors = full_plan(layers.whole(), policy=plan.tensor)
        plan.stages = getattr(model, "stages", None) or split(layers, policy=plan.pipeline, mesh=plan.mesh)
        if plan.pipeline.schedule is ScheduleName.zero_bubble:
            plan.deferred.attach(model)
    if not plan.trained and plan.optimizer.lr > 0:  # lr=0: a model that only runs forward, its parameters frozen
        raise ValueError("no parameter of the model requires gradients: there is nothing to train")


def apply_tensor(plan: Plan, *, parts: Mapping[str, Part] | None) -> None:
    """Cuts weights over the tensor-parallel ranks, unless `parts` describes a cut model."""
    if parts is not None:
        plan.parts |= parts
    elif plan.mesh.comm("tp").size > 1:
        plan.tensors = shard_tensors(plan.model, mesh=plan.mesh, policy=plan.tensor, plan=plan.full_tensors)
        check_parts(plan.model, names=plan.float8)
        plan.tensors.check_dropout(plan.model)
        plan.parts |= plan.tensors.parts


def apply_sequence(plan: Plan, *, gathers_outputs: bool = False) -> None:
    """Gives each rank of the context and sequence axes a part of every sequence. gathers_outputs: see `parallelize`."""
    if plan.mesh.topology.sequence_ranks > 1:
        cut_sequences(
            plan.model,
            mesh=plan.mesh,
            tokens_cut_along_tp=plan.tensor.sequence_parallel,
            gathers_outputs=gathers_outputs,
        )


def apply_experts(plan: Plan) -> None:
    """Distributes experts over the ranks of the expert axis."""
    plan.parts |= shard_experts(
        plan.model, mesh=plan.mesh, pattern=plan.experts, tokens_cut_along_tp=plan.tensor.sequence_parallel
    )


def apply_copies(plan: Plan) -> None:
    """Gives parameters that several stages hold the same first values and marks them as copies."""
    if plan.stages is not None:
        share_values(plan.stages, comm=plan.mesh.comm("pp"))
        plan.parts = mark_copies(plan.parts, stages=plan.stages, comm=plan.mesh.comm("pp"))


def _embeddings(plan: Plan) -> frozenset[str]:
    """Names of embedding weights, including tied heads, on all stages of a pipeline."""
    tables = {
        id(weight)
        for module in plan.model.modules()
        if isinstance(module, nn.Embedding)
        for weight in module.parameters()
    }
    own = {name for name, parameter in plan.model.named_parameters() if id(parameter) in tables}
    if plan.optimizer.name != "muon" or plan.mesh.comm("pp").size == 1:
        return frozenset(own)
    return frozenset().union(*plan.mesh.comm("pp").gather_objects(own))


def _check_matrices(plan: Plan, *, groups: GroupTable) -> None:
    """Raises ValueError for a matrix that is not on one group of tensor-parallel ranks, or a cut parameter whose norm LAMB needs."""
    for name, row in groups.row_of.items():
        part = plan.parts.get(name)
        if plan.optimizer.name == "lamb" and part is not None and not part.is_full:
            raise ValueError(
                f"optimizer=lamb takes norms of full parameters, and {name} is cut over ranks: use topology.tensor=1 (and topology.expert=1 "
                "for an expert), or optimizer=adamw"
            )
        if part is None or part.is_full or not groups.rows[row].muon_scale:
            continue
        if part.axis != "data" or plan.mesh.comm("tp").size == 1:
            raise ValueError(
                f"optimizer=muon orthogonalises full matrices, and the parts of {name} are not on the tensor-parallel ranks: use "
                "topology.expert=1 for an expert, optimizer=adamw, or an optimizer.adam_names that matches it"
            )


def apply_zero(plan: Plan, *, groups: GroupTable) -> None:
    """Shards states over the data-parallel ranks, on the tiers of the offload policy."""
    values, offload = plan.initial_values, fit_pool(plan)
    plan.sharded = Zero(
        plan.model,
        policy=plan.zero,
        precision=plan.precision,
        optimizer=plan.flat_optimizer,
        groups=groups,
        stores=make_stores(plan, policy=offload),
        mesh=plan.mesh,
        parts=plan.parts,
        ledger=plan.memory,
        clock=plan.clock,
        piece_size=piece_size(offload, states=plan.state_format),
        optimizer_fraction=offload.optimizer_fraction,
        initial_values=None if values is None else values_of_parts(values, parts=plan.parts),
        skip_unused=plan.optimizer.skip_unused,
        ema=plan.ema,
        float8=plan.float8,
    )
    if plan.tensors is not None:
        plan.tensors.sum_partial_gradients(plan.model)


def apply_recompute(plan: Plan) -> None:
    """Wraps the blocks whose activations are computed again in the backward."""
    recompute_blocks(
        plan.model,
        policy=plan.recompute,
        comm=plan.mesh.comm("tp"),
        ledger=plan.memory,
        is_stage=plan.stages is not None,
        around=repeated.contexts if plan.mesh.comm("ep").size > 1 else None,
    )


def place_buffers(plan: Plan) -> None:
    """Moves buffers to the device, with rank 0's values. Buffers on the meta device are filled by the model: `materialise_buffers(device)`.

    Raises ValueError if it has no such method.
    """
    model, device = plan.model, plan.process.device
    if is_planned(device):
        return
    if any(buffer.is_meta for buffer in model.buffers()):
        if not hasattr(model, "materialise_buffers"):
            raise ValueError("the model has buffers on the meta device and no materialise_buffers(device) to fill them")
        # pyrefly: ignore[not-callable]  # nn.Module types every attribute as Tensor or Module
        model.materialise_buffers(device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                placed = buffer.to(device).contiguous()
                module._buffers[name] = placed
                plan.mesh.comm("data").broadcast(placed, source=0, label=name).wait()


def build_engine(plan: Plan, *, groups: GroupTable) -> Engine:
    """Builds the engine over the model after all techniques are applied; its counters start at zero."""
    control = StepControl(
        optimizer=plan.optimizer,
        groups=groups,
        loss_scale=plan.precision.loss_scale,
        lr_table=plan.lr_table,
        gradient_divisor=plan.mesh.comm("data").size * plan.accumulation_steps,
        device=plan.process.device,
    )
    scale_router_losses(plan.model, loss_scale=control.loss_scale)
    plan.mesh.counters.reset()  # exclude the traffic of building
    kind = Engine
    if plan.stages is not None:
        kind = functools.partial(PipelineEngine, stages=plan.stages, policy=plan.pipeline, deferred=plan.deferred)
    return kind(
        plan.model,
        zero=plan.sharded,
        control=control,
        process=plan.process,
        memory=plan.memory,
        clock=plan.clock,
        io=plan.io,
        accumulation_steps=plan.accumulation_steps,
        module_metrics=metrics_of_experts(plan.model, mesh=plan.mesh),
    )


# Chooses the stores of ZeRO's shards, and the size of an NVMe store's pool.


def make_stores(plan: Plan, *, policy: OffloadPolicy) -> Stores:
    """One store per tier in use. Reduced gradients are stored on the tier where the optimizer runs."""
    made: dict[Tier, Store] = {}
    planned = is_planned(plan.process.device)
    average = plan.ema.offload if plan.ema is not None and plan.has_average_apart else None
    if average is Tier.nvme and not policy.uses_nvme:
        policy = _for_average(policy)

    def store(tier: Tier) -> Store:
        if tier not in made:
            match tier:
                case Tier.none:
                    made[tier] = DeviceStore(device=plan.process.device, ledger=plan.memory)
                case Tier.cpu:
                    made[tier] = (PlannedHostStore if planned else HostStore)(policy, ledger=plan.memory)
                case Tier.nvme:
                    options = {"rank": plan.process.rank, "ledger": plan.memory, "counters": plan.io}
                    made[tier] = PlannedNvmeStore(policy, **options) if planned else NvmeStore(policy, **options)
        return made[tier]

    return Stores(
        optimizer=store(policy.optimizer),
        gradients=store(policy.optimizer if plan.zero.shards_gradients else Tier.none),
        parameters=store(policy.parameters),
        average=None if average is None else store(average),
    )


def _for_average(policy: OffloadPolicy) -> OffloadPolicy:
    """The policy of a store for the average only, which passes through the blocks of its threads. Raises ValueError without a folder."""
    if not policy.nvme_path:
        raise ValueError("ema.offload=nvme needs a folder: set offload.nvme_path=FOLDER")
    return replace(policy, buffer_count=MIN_BUFFER_COUNT, buffer_bytes=min(policy.buffer_bytes, policy.block_bytes))


def fit_pool(plan: Plan) -> OffloadPolicy:
    """`plan.offload` with pool buffers no larger than the largest unit's shard: a small model reserves less than a large one."""
    policy = plan.offload
    if policy.optimizer is not Tier.nvme:
        return policy

    def shard_size(name: str, *, numel: int) -> int:
        axis = plan.parts[name].axis if name in plan.parts else "data"
        return -(-numel // plan.mesh.comm(axis).size)

    sizes = {name: shard_size(name, numel=parameter.numel()) for name, parameter in plan.model.named_parameters()}
    largest = max(sum(sizes[name] for name in unit.owned) for unit in plan_units(plan.model))
    elements = largest + SHARD_ALIGNMENT * PARAMETER_ALIGNMENT  # with room for padding
    block, spare = _block_bytes(plan.state_format)
    needed = -(-(-(-elements * block // SHARD_ALIGNMENT) + spare) // PAGE_BYTES) * PAGE_BYTES
    return replace(policy, buffer_bytes=min(policy.buffer_bytes, needed))


def piece_size(policy: OffloadPolicy, *, states: StateFormat) -> int | None:
    """Elements whose master weights and states fit into a pool buffer, or None if there is no limit.

    Raises ValueError for a buffer that holds too few.
    """
    if policy.optimizer is not Tier.nvme:
        return None  # parameter shards of any size stream through the store's blocks
    block, spare = _block_bytes(states)
    size = max(0, policy.buffer_bytes - spare) // block * SHARD_ALIGNMENT
    if size == 0:
        raise ValueError(
            f"offload.buffer_bytes={policy.buffer_bytes} cannot hold the states of {SHARD_ALIGNMENT} parameters; "
            f"set offload.buffer_bytes={block + spare} or more"
        )
    return size


def _block_bytes(states: StateFormat) -> tuple[int, int]:
    """(bytes of `SHARD_ALIGNMENT` elements' master weights and states, maximum bytes of padding between rows)."""
    rows = states.all_rows(has_master=True)
    spare = 0 if states.is_plain else ROW_ALIGNMENT * len(rows)
    return sum(row.nbytes(SHARD_ALIGNMENT) for row in rows), spare
