"""Derives the optimizer policy and its parameter groups from a script's arguments."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from ztk.core.policies.optimizer import TORCH
from ztk.deepspeed.optimizers.own import DeepSpeedCPUAdam, DeepSpeedCPULion, FusedAdam, FusedLamb, FusedLion
from ztk.optim import OptimizerPolicy, ParameterGroup
from ztk.optim.elementwise import needs_closure
from ztk.optim.script_optimizer import check_step, unhooked

_HYPER = ("lr", "betas", "eps", "weight_decay", "momentum")
# Options of a torch optimizer's group that must have these values, because ztk's own optimizers support no others.
_MUST_BE = {"amsgrad": False, "maximize": False, "dampening": 0}
# Options fixed at the construction of ztk's own optimizers, with the value for a group that lacks them.
_BUILT_WITH = {
    **_MUST_BE,
    "nesterov": False,
    "decoupled_weight_decay": None,
    "bias_correction": True,
    "min_coeff": None,
    "max_coeff": None,
}
# Classes -> ztk's optimizer with the same arithmetic. Derived classes may differ, so their own step runs.
_CLASSES: dict[type, str] = {
    torch.optim.AdamW: "adamw",
    torch.optim.Adam: "adam",
    torch.optim.SGD: "sgd",
    **dict.fromkeys((FusedAdam, DeepSpeedCPUAdam), "adam"),
    **dict.fromkeys((FusedLion, DeepSpeedCPULion), "lion"),
    FusedLamb: "lamb",
}
_STEPS = {cls: unhooked(cls.step) for cls in _CLASSES}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedGroups:
    """The policy, and the groups in the script's form (dicts with "params") and by name.

    client: the script's optimizer, or None. defaults: options of groups that do not set them, as in a torch optimizer.
    """

    policy: OptimizerPolicy
    groups: list[dict]
    names: list[list[str]]
    client: torch.optim.Optimizer | None
    defaults: dict


def groups_of_config(policy: OptimizerPolicy, *, model: nn.Module, model_parameters: Iterable | None) -> TrainedGroups:
    """Returns the configuration's optimizer over `model_parameters`: parameters, groups of them, or None for all.

    Raises ValueError for parameters that are not the model's, and for duplicates.
    """
    defaults = {key: value for key in _HYPER if (value := getattr(policy, key)) is not None}
    if policy.name == "sgd":
        defaults["nesterov"] = policy.nesterov
    else:
        defaults.pop("momentum")
    given = list(model.parameters() if model_parameters is None else model_parameters)
    if not given:
        raise ValueError("model_parameters is empty; an iterator that was used before is, too: pass model.parameters()")
    if not isinstance(given[0], Mapping):
        given = [{"params": given}]
    groups = [{**defaults, **group, "params": _list(group["params"])} for group in _experts_apart(given)]
    return _trained(policy, model=model, groups=groups, client=None, defaults=defaults)


def groups_of_client(
    optimizer: torch.optim.Optimizer | Callable,
    *,
    model: nn.Module,
    model_parameters: Iterable | None,
    clip: float,
    skip_unused: bool = False,
) -> TrainedGroups:
    """Returns the groups of a torch optimizer, or of a callable that creates one from `model_parameters`.

    An optimizer's own parameters count, as in DeepSpeed. The policy names ztk's optimizer if one has the same arithmetic, else "torch",
    and the optimizer's own step runs.

    Raises ValueError for an object that is not an optimizer, and for an optimizer that has made steps or needs a closure.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise ValueError(f"optimizer={optimizer!r:.80}: must be a torch optimizer, or a callable that makes one")
        optimizer = optimizer(model.parameters() if model_parameters is None else model_parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer: made a {type(optimizer).__name__}, which is no torch.optim.Optimizer: derive its class from it"
        )
    check_step(optimizer)
    policy = _own_policy(optimizer, clip=clip) or OptimizerPolicy(name=TORCH, decay_all=True, clip_grad_norm=clip)
    policy = replace(policy, skip_unused=skip_unused)
    if policy.name == TORCH and needs_closure(optimizer):
        raise ValueError(
            f"optimizer={type(optimizer).__name__}: its step needs a closure, and DeepSpeed's engine.step() passes none: use "
            "ztk.parallelize, whose engine.train_batch(micro_batches) and engine.step(closure) do"
        )
    if optimizer.state and policy.name != TORCH:  # a class may set states in its constructor
        raise ValueError("optimizer: has made steps already, and ztk cannot take its states over; pass a fresh one")
    return _trained(
        policy, model=model, groups=optimizer.param_groups, client=optimizer, defaults=dict(optimizer.defaults)
    )


def _own_policy(optimizer: torch.optim.Optimizer, *, clip: float) -> OptimizerPolicy | None:
    """Returns the policy of ztk's optimizer with the same arithmetic in all groups, or None."""
    name, groups = _CLASSES.get(type(optimizer)), optimizer.param_groups
    if unhooked(type(optimizer).step) is not _STEPS.get(type(optimizer)):  # another class, or changed by a script
        return None
    if name is None or any(group.get(key, value) != value for group in groups for key, value in _MUST_BE.items()):
        return None
    decoupled = {bool(group.get("decoupled_weight_decay", name == "adamw")) for group in groups}
    if len(decoupled) > 1:
        return None
    if name == "adam" and decoupled == {True}:
        name = "adamw"
    options = {key: float(groups[0][key]) for key in ("lr", "weight_decay")}
    if name == "sgd":
        momenta = [float(group["momentum"]) for group in groups]
        nesterov = {bool(group["nesterov"]) for group in groups if float(group["momentum"])}
        if len(nesterov) > 1:
            return None
        options |= {"momentum": max(momenta), "nesterov": nesterov == {True}}
    else:
        options["betas"] = tuple(map(float, groups[0]["betas"]))
    if name == "lamb":
        bounds = {(float(group["min_coeff"]), float(group["max_coeff"])) for group in groups}
        if len(bounds) > 1:
            raise ValueError(
                "optimizer: min_coeff and max_coeff differ between groups, and one LAMB runs them all; make them equal"
            )
        options["min_coeff"], options["max_coeff"] = bounds.pop()
    if "eps" in groups[0]:
        options["eps"] = float(groups[0]["eps"])
    corrected = {bool(group.get("bias_correction", True)) for group in groups}
    if len(corrected) > 1:
        raise ValueError(
            "optimizer: bias_correction differs between groups, and one optimizer runs them all; make it equal"
        )
    if corrected == {False}:
        options["bias_correction"] = False
    return OptimizerPolicy(name=name, decay_all=True, clip_grad_norm=clip, **options)


class FixedOptions:
    """Detects changes of group options that are not allowed after `initialize`. `check` runs before every step."""

    def __init__(self, groups: list[dict], *, policy: OptimizerPolicy) -> None:
        self._groups, self._policy = groups, policy
        self._before = [self._options(group) for group in groups]

    def check(self) -> None:
        """Raises ValueError for a changed option that ztk's own optimizers cannot follow. Other optimizers' steps read all options."""
        if self._policy.name == TORCH:
            return
        for number, (group, before) in enumerate(zip(self._groups, self._before, strict=True)):
            for key, value in self._options(group).items():
                if value != before[key]:
                    raise ValueError(
                        f"param_groups[{number}]['{key}'] is {value} now and was {before[key]} at initialize, and the engine's "
                        f"{self._policy.name} is built with it: set it before initialize, or destroy() the engine and initialize again "
                        "(lr, betas, eps and weight_decay may change)"
                    )

    def _options(self, group: Mapping) -> dict:
        found = {key: group.get(key, value) for key, value in _BUILT_WITH.items()}
        if self._policy.name == "sgd" and not self._policy.momentum:  # there is no momentum buffer
            found["momentum"] = group.get("momentum", 0.0)
        return found


def count_beyond(optimizer: torch.optim.Optimizer, *, model_parameters: Iterable) -> int:
    """Returns the number of trainable parameters in `model_parameters` (parameters, or groups of them) that the optimizer does not
    have.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    listed = [p for entry in model_parameters for p in _list(entry["params"] if isinstance(entry, Mapping) else entry)]
    return sum(parameter.requires_grad and id(parameter) not in held for parameter in listed)


def freeze_others(model: nn.Module, *, names: set[str]) -> list[str]:
    """Freezes all parameters without a group. Returns the names of those that were not frozen before."""
    frozen = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in names:
            parameter.requires_grad_(False)
            frozen.append(name)
    return frozen


def hyper_row(group: Mapping, *, policy: OptimizerPolicy) -> tuple[float, ...]:
    """Returns a group's lr, beta1, beta2, eps, weight_decay, momentum: the columns of `ztk.kernels.Hyper`.

    For an optimizer whose own step runs, only the learning rate is set, for metrics; 0 if it has none.
    """
    if policy.name == TORCH:
        lr = group.get("lr")
        return (float(lr) if isinstance(lr, int | float | torch.Tensor) else 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    beta1, beta2 = group.get("betas", (0.0, 0.0))
    values = (
        group["lr"],
        beta1,
        beta2,
        group.get("eps", 0.0) or 0.0,
        group.get("weight_decay", 0.0),
        group.get("momentum", 0.0) if policy.momentum else 0.0,
    )
    return tuple(float(value) for value in values)


def _trained(
    policy: OptimizerPolicy,
    *,
    model: nn.Module,
    groups: list[dict],
    client: torch.optim.Optimizer | None,
    defaults: dict,
) -> TrainedGroups:
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    seen: dict[str, int] = {}
    names: list[list[str]] = []
    for number, group in enumerate(groups):
        names.append([])
        for parameter in group["params"]:
            name = name_of.get(id(parameter))
            if name is None:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} in parameter group {number} is not the model's; "
                    "make the optimizer of model.parameters() of the very model that is passed"
                )
            if name in seen:
                raise ValueError(
                    f"parameter {name} is in the parameter groups {seen[name]} and {number}; keep it in one of them"
                )
            seen[name] = number
            if parameter.requires_grad:
                names[-1].append(name)
    if not any(names):
        raise ValueError("none of the optimizer's parameters requires a gradient; there is nothing to train")
    return TrainedGroups(
        policy=replace(policy, groups=_patterns(policy, groups=groups, names=names)),
        groups=groups,
        names=names,
        client=client,
        defaults=defaults,
    )


def _patterns(policy: OptimizerPolicy, *, groups: list[dict], names: list[list[str]]) -> tuple[ParameterGroup, ...]:
    """Returns one row of hyperparameters per group, even if they are equal, because a schedule may change them separately."""
    made = []
    for group, own in zip(groups, names, strict=True):
        if not own:
            continue
        pattern = "^(?:" + "|".join(map(re.escape, own)) + ")$"
        if policy.name == TORCH:
            made.append(ParameterGroup(pattern=pattern))
            continue
        lr, beta1, beta2, eps, weight_decay, momentum = hyper_row(group, policy=policy)
        made.append(
            ParameterGroup(
                pattern=pattern,
                lr=lr,
                betas=(beta1, beta2) if policy.betas is not None else None,
                eps=eps if policy.eps is not None else None,
                weight_decay=weight_decay,
                momentum=momentum if policy.momentum else None,
            )
        )
    return tuple(made)


def _experts_apart(groups: list) -> list:
    """Removes the experts of a group marked "moe" from the others, because the helper in DeepSpeed's documentation lists experts
    twice.
    """
    experts = {id(p) for group in groups if group.get("moe") for p in _list(group["params"])}
    if not experts:
        return groups
    return [
        group if group.get("moe") else {**group, "params": [p for p in _list(group["params"]) if id(p) not in experts]}
        for group in groups
    ]


def _list(params: object) -> list[torch.Tensor]:
    return [params] if isinstance(params, torch.Tensor) else list(params)
