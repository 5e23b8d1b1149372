"""Builds an engine that uses torch's data parallelism from a plain module and ztk's policies."""

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from ztk.core.precision import LossScalePolicy, PrecisionPolicy
from ztk.core.runtime import MemoryLedger, PhaseClock, Process
from ztk.core.runtime.io import IoCounters
from ztk.optim import HyperParameters, OptimizerPolicy, group_parameters
from ztk.parallel.recompute import RecomputePolicy, recompute_blocks
from ztk.train.engine.peers.peer_engine import PeerEngine
from ztk.train.engine.peers.wrap import DataParallelPeer, FullyShardedPeer

_PEERS = {peer.name: peer for peer in (DataParallelPeer, FullyShardedPeer)}


def parallelize_peer(
    model: nn.Module,
    *,
    kind: str,
    process: Process,
    optimizer: OptimizerPolicy,
    lr_table: Tensor | None = None,
    precision: PrecisionPolicy | None = None,
    recompute: RecomputePolicy | None = None,
    accumulation_steps: int = 1,
    initial_values: Callable[..., Tensor] | None = None,
) -> PeerEngine:
    """Prepares `model` for training by torch's DistributedDataParallel (`kind="ddp"`) or fully_shard (`"fsdp2"`). A collective call.

    Takes the arguments of `ztk.parallelize`. Initial values, parameter groups, clipping and learning rates (lr_table: [steps]) are the
    same. Parameters stay fp32, and 16-bit compute uses torch's means (autocast, or FSDP's mixed precision). There is no offloading.

    Raises ValueError for settings that torch does not support.
    """
    if kind not in _PEERS:
        raise ValueError(f"zero.engine={kind}: must be one of {', '.join(_PEERS)}")
    precision = precision or PrecisionPolicy()
    if optimizer.states != "fp32" or precision.master not in (None, "fp32") or precision.bf16_master:
        raise ValueError(
            f"zero.engine={kind} runs torch's optimizers on float32 weights: use optimizer.states=fp32 without precision.master and without "
            "precision.bf16_master"
        )
    if precision.float8 is not None:
        raise ValueError(
            f"precision.float8={precision.float8}: zero.engine={kind} has no float8 products; use zero=stage0 to stage3, or precision=bf16"
        )
    scaler = torch_scaler(precision.loss_scale, device=process.device)
    meta = any(parameter.is_meta for parameter in model.parameters())
    if meta and initial_values is None:
        raise ValueError(
            "the model is on the meta device and has no values: pass initial_values, or build it on a real one"
        )
    if not meta:
        model.to(process.device)
        for name, parameter in model.named_parameters():
            process.comm.broadcast(parameter.data, source=0, label=name).wait()
    elif kind == "ddp":
        _materialise(model, device=process.device)
        _fill(model, initial_values=initial_values)
    memory = MemoryLedger()
    recompute_blocks(
        model, policy=recompute or RecomputePolicy(), ledger=memory
    )  # must wrap before torch installs its hooks
    peer = _PEERS[kind](model, process=process, precision=precision)
    if meta and kind == "fsdp2":
        _materialise(model, device=process.device)
        _fill(model, initial_values=initial_values)
    made = torch_optimizer(optimizer, model=model)
    process.comm.counters.reset()
    return PeerEngine(
        model,
        peer=peer,
        optimizer=made,
        schedule=torch_schedule(made, lr_table=lr_table),
        scaler=scaler,
        clip_grad_norm=optimizer.clip_grad_norm,
        process=process,
        memory=memory,
        clock=PhaseClock(),
        io=IoCounters(),
        accumulation_steps=accumulation_steps,
    )


def _materialise(model: nn.Module, *, device: torch.device) -> None:
    """Allocates meta parameters and buffers on `device`, and ties shared weights again, because `to_empty` separates them."""
    first: dict[nn.Parameter, str] = {}
    tied = {}  # name -> first name of the same parameter
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied[name] = first.setdefault(parameter, name)
    model.to_empty(device=device)
    for name, original in tied.items():
        if name != original:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._parameters[leaf] = model.get_parameter(original)
    if next(model.buffers(), None) is not None:
        if not hasattr(model, "materialise_buffers"):
            raise ValueError("the model has buffers on the meta device and no materialise_buffers(device) to fill them")
        # pyrefly: ignore[not-callable]  # nn.Module types every attribute as Tensor or Module
        model.materialise_buffers(device)


@torch.no_grad()
def _fill(model: nn.Module, *, initial_values: Callable[..., Tensor]) -> None:
    """Sets the initial values. A rank sets only its own rows of a sharded parameter."""
    for name, parameter in model.named_parameters():
        local, start = parameter, 0
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            rows = -(-parameter.shape[0] // parameter.device_mesh.size())  # the split of torch.chunk
            start = min(rows * parameter.device_mesh.get_local_rank(), parameter.shape[0])
            start *= parameter.numel() // parameter.shape[0]
        local.copy_(initial_values(name=name, start=start, stop=start + local.numel()).view(local.shape))


# Translates ztk's policies to torch's optimizer, schedule and gradient scaler, or raises. Rate tables may have any floating-point dtype.

# The options of torch.amp.GradScaler.
_SCALER_OPTIONS = ("dynamic", "initial", "window", "growth_factor", "backoff_factor")


def torch_optimizer(policy: OptimizerPolicy, *, model: nn.Module) -> torch.optim.Optimizer:
    """Returns torch's fused optimizer with the parameter groups of the policy.

    Raises ValueError for an optimizer or an option that torch does not have.
    """
    if not policy.bias_correction:
        raise ValueError(
            f"optimizer.bias_correction=false: torch's {policy.name} always corrects; leave it out, or use a stage of ztk"
        )
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    table = group_parameters(policy, shapes={name: parameter.shape for name, parameter in trained.items()})
    groups = [
        {"params": [p for name, p in trained.items() if table.row_of[name] == number], **_options(policy, row=row)}
        for number, row in enumerate(table.rows)
    ]
    match policy.name:
        case "adamw":
            return torch.optim.AdamW(groups, fused=True)
        case "adam":
            return torch.optim.Adam(groups, fused=True)
        case "sgd":
            return torch.optim.SGD(groups, fused=True)
    raise ValueError(
        f"optimizer.name={policy.name}: torch has no fused {policy.name} to compare with; use optimizer=adamw, adam or "
        "sgd with zero=ddp and zero=fsdp2, or a stage of ztk"
    )


def _options(policy: OptimizerPolicy, *, row: HyperParameters) -> dict[str, object]:
    common = {"lr": row.lr, "weight_decay": row.weight_decay}
    if policy.name == "sgd":
        return {**common, "momentum": row.momentum, "nesterov": policy.nesterov}
    return {**common, "betas": (row.beta1, row.beta2), "eps": row.eps}


def torch_schedule(optimizer: torch.optim.Optimizer, *, lr_table: Tensor | None) -> LambdaLR:
    """Returns a schedule: update t uses the group's rate times entry t of `lr_table` [steps], and the last entry continues.

    Raises ValueError for a table that also has the momentum.
    """
    if lr_table is not None and lr_table.dim() == 2:
        raise ValueError(
            "the schedule changes the momentum, which the peers do not follow: set scheduler.cycle_momentum=false"
        )
    multipliers = [1.0] if lr_table is None else lr_table.tolist()
    return LambdaLR(optimizer, lambda update: multipliers[min(update, len(multipliers) - 1)])


def torch_scaler(policy: LossScalePolicy, *, device: torch.device) -> torch.amp.GradScaler | None:
    """Returns torch's gradient scaler, or None without scaling. Defaults for hysteresis and bounds, which torch lacks, are ignored.

    Raises ValueError for other options that torch does not have.
    """
    if policy == LossScalePolicy.off():
        return None
    if not policy.dynamic:
        raise ValueError(
            f"precision.loss_scale.dynamic=false with precision.loss_scale.initial={policy.initial:g}: torch's GradScaler "
            "has no static scale; use a dynamic one with zero=ddp and zero=fsdp2, or a stage of ztk"
        )
    for option in fields(policy):
        value = getattr(policy, option.name)
        if option.name not in _SCALER_OPTIONS and value != option.default:
            raise ValueError(
                f"precision.loss_scale.{option.name}={value} has no effect on torch's GradScaler: leave it out with "
                "zero=ddp and zero=fsdp2, or use a stage of ztk"
            )
    return torch.amp.GradScaler(
        device.type,
        init_scale=policy.initial,
        growth_factor=policy.growth_factor,
        backoff_factor=policy.backoff_factor,
        growth_interval=policy.window,
    )
