"""Translates ztk's policies to torch's optimizer, schedule and gradient scaler, or raises. Rate tables may have any floating-point
dtype.
"""

from dataclasses import fields

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ztk.core.precision import LossScalePolicy
from ztk.optim import HyperParameters, OptimizerPolicy, group_parameters

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
