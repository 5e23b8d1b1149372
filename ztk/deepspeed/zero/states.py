"""safe_get/set: one parameter's whole weight, gradient or optimizer state in fp32. Collective calls: every rank makes them alike."""

import torch
from torch import Tensor, nn

from ztk.deepspeed.owners import Owner, owner_of
from ztk.zero.whole import read_gradient, read_whole, write_whole


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The master weight, fp32, in the parameter's shape; None for a parameter of no engine."""
    owner = owner_of(param)
    if owner is None:
        return None
    return read_whole(owner.engine.zero, bucket=owner.bucket, name=owner.name, kind=_weights(owner))


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The gradient that the coming step will use, before clipping: averaged, without loss scale.

    Between the backward at a boundary and `step()`; None at other times and for a parameter of no engine.
    """
    owner = owner_of(param)
    if owner is None or not owner.bucket.traits.trainable:
        return None
    engine = owner.engine
    gradient = read_gradient(engine.zero, bucket=owner.bucket, name=owner.name)
    if gradient is None:
        return None
    return gradient / (engine.control.loss_scale * engine.process.world_size * engine.accumulation_steps)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """State `optim_state_key` ("exp_avg", "exp_avg_sq", "momentum_buffer"), fp32; None for a parameter that is not trained.

    Raises ValueError for a state that the optimizer does not have.
    """
    owner = owner_of(param)
    if owner is None or not owner.bucket.traits.trainable:
        return None
    _check_state(owner, key=optim_state_key)
    return read_whole(owner.engine.zero, bucket=owner.bucket, name=owner.name, kind=optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Sets the master weight and with it the parameter. value: in the parameter's shape, the same on all ranks."""
    owner = _owned(param, value=value)
    write_whole(owner.engine.zero, bucket=owner.bucket, values={owner.name: value}, kind=_weights(owner))


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Sets one optimizer state. value: in the parameter's shape, the same on all ranks."""
    owner = _owned(param, value=value)
    if not owner.bucket.traits.trainable:
        raise ValueError(f"parameter {owner.name} is frozen and has no optimizer states")
    _check_state(owner, key=optim_state_key)
    write_whole(owner.engine.zero, bucket=owner.bucket, values={owner.name: value}, kind=optim_state_key)


def _weights(owner: Owner) -> str:
    return "master" if owner.bucket.traits.trainable else "parameter"


def _owned(param: nn.Parameter, *, value: Tensor) -> Owner:
    owner = owner_of(param)
    if owner is None:
        raise ValueError("the parameter belongs to no engine; pass one of engine.module's, after initialize")
    if not isinstance(value, torch.Tensor) or value.shape != param.shape:
        raise ValueError(f"value for {owner.name}: must be a tensor of shape {tuple(param.shape)}")
    return owner


def _check_state(owner: Owner, *, key: str) -> None:
    names = owner.engine.zero.optimizer.state_names
    if key not in names:
        raise ValueError(f"optim_state_key={key!r}: this optimizer keeps {', '.join(names) or 'no states'}")
