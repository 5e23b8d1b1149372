"""safe_get/set_local: what this rank keeps of a parameter, its gradient and optimizer states in fp32, without the other ranks.

ztk shards flat buffers of many parameters, so a rank keeps any range of a parameter's elements: a part, all of it, or nothing. What a `get`
returns, a `set` takes, in the same flat shape. Shapes are [n], of the elements that this rank keeps. Stage 3 only, as in DeepSpeed.
Values that are set have any floating-point dtype.
"""

import torch
from torch import Tensor, nn

from ztk.deepspeed.engine.owners import Owner, owner_of
from ztk.deepspeed.zero.states import check_state, divisor_of, need_gradient, weights_of
from ztk.zero.state.named import local_range
from ztk.zero.update.piece_states import GRADIENT, MASTER


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """fp32 [elements of this rank]: the master weights; None for a frozen parameter."""
    owner = _owner(param)
    return (
        owner.engine.zero.named_state.read_local(owner.bucket, name=owner.name, kind=MASTER)
        if _trained(owner)
        else None
    )


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """fp32 [elements of this rank]: the gradient that the coming step will use, averaged, without loss scale.

    Between the backward at a boundary and `step()`; None at other times and for a frozen parameter.
    """
    owner = _owner(param)
    if not _trained(owner):
        return None
    gradient = owner.engine.zero.named_state.read_local(owner.bucket, name=owner.name, kind=GRADIENT)
    return None if gradient is None else gradient / divisor_of(owner)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """fp32 [elements of this rank]: one optimizer state; None for a frozen parameter."""
    owner = _owner(param)
    if not _trained(owner):
        return None
    check_state(owner, key=optim_state_key)
    return owner.engine.zero.named_state.read_local(owner.bucket, name=owner.name, kind=optim_state_key)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Sets this rank's master weights and with them the parameter; of a parameter that is never sharded all ranks must call it."""
    owner = _fitting(param, value=value)
    owner.engine.zero.named_state.write_local(owner.bucket, name=owner.name, kind=weights_of(owner), value=value)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Sets this rank's part of the gradient, as `safe_get_local_grad` gives it. Raises ValueError if no step is due."""
    owner = _fitting(param, value=value)
    need_gradient(owner)
    scaled = value.detach().reshape(-1).to(owner.engine.process.device, torch.float32) * divisor_of(owner)
    owner.engine.zero.named_state.write_local(owner.bucket, name=owner.name, kind=GRADIENT, value=scaled)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Sets this rank's part of one optimizer state."""
    owner = _fitting(param, value=value)
    check_state(owner, key=optim_state_key, sets=True)
    owner.engine.zero.named_state.write_local(owner.bucket, name=owner.name, kind=optim_state_key, value=value)


def _owner(param: nn.Parameter) -> Owner:
    owner = owner_of(param)
    if owner is None or not owner.engine.zero.policy.shards_parameters:
        raise ValueError(
            "local parts exist at stage 3 only, of an engine's parameters; use safe_get_full_* and safe_set_full_*"
        )
    return owner


def _trained(owner: Owner) -> bool:
    return owner.bucket.traits.trainable


def _fitting(param: nn.Parameter, *, value: Tensor) -> Owner:
    owner = _owner(param)
    if not _trained(owner):
        raise ValueError(f"parameter {owner.name} is frozen: it has no master weights, gradient or optimizer states")
    expected = len(local_range(owner.bucket, name=owner.name))
    if not isinstance(value, Tensor) or value.numel() != expected:
        raise ValueError(f"value for {owner.name}: must be a tensor of {expected} elements, what this rank keeps of it")
    return owner
