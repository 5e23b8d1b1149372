"""The sections optimizer and scheduler: DeepSpeed's names and parameters as a policy, and one of five schedules."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ztk.core.policies.optimizer import TORCH
from ztk.core.policies.suggest import did_you_mean
from ztk.deepspeed.config.keys import (
    Convert,
    Findings,
    Key,
    anything,
    at_least,
    boolean,
    fixed,
    hint,
    nearest,
    one_of,
    optional,
    read_section,
    shown,
    takes,
    whole_number,
)
from ztk.optim import OptimizerPolicy

_OPTIMIZER = {
    "type": takes(anything),
    "params": takes(anything),
    "legacy_fusion": fixed(False, why="ztk's optimizer is always fused; leave it out"),
}
_COMMON = {"lr": takes(at_least(0)), "weight_decay": takes(at_least(0))}


def _betas(value: object) -> tuple[float, float]:
    if isinstance(value, (list, tuple)) and len(value) == 2:
        first, second = (at_least(0)(beta) for beta in value)
        return first, second
    raise ValueError("must be two numbers from 0 to below 1, such as [0.9, 0.999]")


_ADAM = {
    **_COMMON,
    "betas": takes(_betas),
    "eps": takes(at_least(0)),
    "adam_w_mode": takes(boolean),
    "bias_correction": takes(boolean),
    "amsgrad": fixed(False, why="not offered by name; pass torch.optim.AdamW(..., amsgrad=True) to initialize"),
    "torch_adam": hint(boolean, "there is one Adam, it needs no compiler", usual=(False,)),
    "set_grad_none": hint(boolean, "gradients live in flat buffers", usual=(True,)),
    "fp32_optimizer_states": fixed(True, why="not offered: optimizer states are fp32; leave it out"),
}
_LION = {**_COMMON, "betas": takes(_betas), "set_grad_none": hint(boolean, "gradients live in flat buffers")}
_SGD = {
    **_COMMON,
    "momentum": takes(at_least(0)),
    "nesterov": takes(boolean),
    "dampening": fixed(0, 0.0, why="not offered by name; pass torch.optim.SGD(..., dampening=...) to initialize"),
    "maximize": fixed(False, why="not offered by ztk; turn the sign of the loss"),
}
_LAMB = {
    **_COMMON,
    "betas": takes(_betas),
    "eps": takes(at_least(0)),
    "bias_correction": takes(boolean),
    "min_coeff": takes(at_least(0)),
    "max_coeff": takes(at_least(0)),
    "eps_inside_sqrt": fixed(False, why="not offered: eps is added to the root; leave it out"),
    "amsgrad": fixed(False, why="not offered, by DeepSpeed neither; leave it out"),
    "set_grad_none": hint(boolean, "gradients live in flat buffers", usual=(True,)),
}
TYPES: dict[str, dict[str, Key]] = {"adam": _ADAM, "adamw": _ADAM, "lion": _LION, "lamb": _LAMB, "sgd": _SGD}
# torch's own classes, whose step runs on the shards. Their parameters are the arguments of the class.
TORCH_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    cls.__name__.lower(): cls
    for cls in (
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    )
}
_NOT_OFFERED = ("muon", "muadam", "muadamw", "musgd")
_REMOVED = ("onebitadam", "onebitlamb", "zerooneadam")
_ELSEWHERE = {
    "max_grad_norm": "belongs to the top level: write gradient_clipping there",
    "fused": "ztk's optimizer is always fused; leave it out",
    "foreach": "ztk's optimizer is always fused; leave it out",
}


def read_optimizer(given: object, *, clip: float, findings: Findings) -> OptimizerPolicy | None:
    """Returns the policy, or None if the section is missing or faulty. Every parameter decays, as in DeepSpeed."""
    if given is None:
        return None
    section = read_section(given, path="optimizer.", keys=_OPTIMIZER, findings=findings)
    name = section.get("type")
    if name is None:
        findings.faults.append(f"optimizer.type: is missing; give one of {', '.join(TYPES)}")
        return None
    if isinstance(name, str) and name.lower() in TORCH_CLASSES:
        try:
            make_torch_optimizer(given, [torch.nn.Parameter(torch.zeros(1))])
        except (TypeError, ValueError) as error:
            findings.faults.append(f"optimizer.params: torch.optim.{TORCH_CLASSES[name.lower()].__name__}: {error}")
            return None
        return OptimizerPolicy(name=TORCH, decay_all=True, clip_grad_norm=clip)
    if not isinstance(name, str) or name.lower() not in TYPES:
        findings.faults.append(f"optimizer.type={shown(name)}: {_unknown(name)}")
        return None
    name = name.lower()
    values = read_section(
        section.get("params") or {},
        path="optimizer.params.",
        keys=TYPES[name],
        findings=findings,
        elsewhere=_ELSEWHERE,
    )
    return _policy(name, values=values, clip=clip, findings=findings)


def make_torch_optimizer(section: Any, parameters: Iterable) -> torch.optim.Optimizer:
    """Creates the torch optimizer of a section with one of `TORCH_CLASSES`. Raises TypeError or ValueError for invalid parameters."""
    return TORCH_CLASSES[section["type"].lower()](parameters, **(section.get("params") or {}))


def _unknown(name: object) -> str:
    words = ", ".join((*TYPES, *TORCH_CLASSES))
    plain = str(name).lower()
    if plain in _REMOVED:
        return f"was removed from DeepSpeed in 0.19.8; use one of {words}"
    if plain in _NOT_OFFERED:
        return f"not offered by ztk yet; use one of {words}"
    return f"must be one of {words}{did_you_mean(nearest(plain, known=(*TYPES, *TORCH_CLASSES)))}"


def _policy(name: str, *, values: dict, clip: float, findings: Findings) -> OptimizerPolicy | None:
    """Returns the policy. adam means AdamW unless adam_w_mode is false. Defaults are DeepSpeed's."""
    decoupled = values.pop("adam_w_mode", True)
    if name == "adamw" and not decoupled:
        findings.faults.append("optimizer.params.adam_w_mode=False: has no effect with AdamW; write type Adam")
    if name in ("adam", "adamw"):
        name = "adamw" if decoupled or name == "adamw" else "adam"
        values.setdefault("eps", 1e-8)
    if name != "sgd":
        values.setdefault("betas", (0.9, 0.999))
    values.setdefault("lr", 1e-3)
    try:
        return OptimizerPolicy(name=name, decay_all=True, clip_grad_norm=clip, **values)
    except ValueError as error:
        findings.faults.append(f"optimizer.params: {error}")
        return None


_SCHEDULER = {"type": takes(anything), "params": takes(anything)}


def _per_group(convert: Convert) -> Convert:
    """Returns a conversion for one number, or a list with one per parameter group."""

    def converted(value: object) -> object:
        return [convert(item) for item in value] if isinstance(value, (list, tuple)) else convert(value)

    return converted


_rate = _per_group(at_least(0))
_LAST = {"last_batch_iteration": fixed(-1, why="a checkpoint has the position of a schedule; leave it out")}
# The Hugging Face Trainer fills in 0 if there is no warmup_steps. DeepSpeed treats values below 2 as 2.
_WARMUP = {"warmup_num_steps": takes(whole_number(0)), "warmup_type": takes(one_of("log", "linear")), **_LAST}
_RATES = {"warmup_min_lr": takes(_rate), "warmup_max_lr": takes(optional(_rate))}
_TOTAL = {"total_num_steps": takes(whole_number(1))}
SCHEDULES = {
    "LRRangeTest": {
        "lr_range_test_min_lr": takes(_rate),
        "lr_range_test_step_size": takes(whole_number(1)),
        "lr_range_test_step_rate": takes(at_least(0)),
        "lr_range_test_staircase": takes(boolean),
        **_LAST,
    },
    "OneCycle": {
        "cycle_min_lr": takes(_rate),
        "cycle_max_lr": takes(_rate),
        "decay_lr_rate": takes(at_least(0)),
        "cycle_first_step_size": takes(whole_number(1)),
        "cycle_second_step_size": takes(optional(whole_number(0))),
        "cycle_first_stair_count": takes(whole_number(0)),
        "cycle_second_stair_count": takes(optional(whole_number(0))),
        "decay_step_size": takes(whole_number(0)),
        "cycle_momentum": takes(boolean),
        "cycle_min_mom": takes(_rate),
        "cycle_max_mom": takes(_rate),
        "decay_mom_rate": takes(at_least(0)),
        **_LAST,
    },
    "WarmupLR": {**_RATES, **_WARMUP},
    "WarmupDecayLR": {**_TOTAL, **_RATES, **_WARMUP},
    "WarmupCosineLR": {
        **_TOTAL,
        **_WARMUP,
        "warmup_min_ratio": takes(at_least(0)),
        "cos_min_ratio": takes(at_least(0)),
    },
}
_REQUIRED = {
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleChoice:
    """A schedule and its parameters, with DeepSpeed's names."""

    type: str
    params: dict


def read_scheduler(given: object, *, findings: Findings) -> ScheduleChoice | None:
    """Reads the section. Returns None if it is missing or faulty."""
    if given is None:
        return None
    section = read_section(given, path="scheduler.", keys=_SCHEDULER, findings=findings)
    name = section.get("type")
    if name is None:
        if given:
            findings.faults.append(f"scheduler.type: is missing; give one of {', '.join(SCHEDULES)}")
        return None
    if not isinstance(name, str) or name not in SCHEDULES:
        near = did_you_mean(nearest(str(name), known=SCHEDULES))
        findings.faults.append(f"scheduler.type={shown(name)}: must be one of {', '.join(SCHEDULES)}{near}")
        return None
    params: Any = section.get("params") or {}
    values = read_section(params, path="scheduler.params.", keys=SCHEDULES[name], findings=findings)
    for key in _REQUIRED.get(name, ()):
        if params.get(key) is None:
            findings.faults.append(f"scheduler.params.{key}: is missing; {name} needs it")
    return ScheduleChoice(type=name, params=values)
