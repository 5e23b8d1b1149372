"""safe_get/set: one parameter's weight, gradient or optimizer state in fp32; in full, or what this rank keeps of it.

Shapes in full are those of the full parameter, and the calls are collective: every rank makes them alike. `..._local_...` works without the
other ranks and at stage 3 only, as in DeepSpeed: ztk shards flat buffers of many parameters, so a rank keeps any range of a parameter's
elements, a part, all of it or nothing, in the flat shape [n]. Values that are set have any floating-point dtype.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ztk.deepspeed.engine.gradients import local_gradient
from ztk.deepspeed.engine.owners import Owner, owner_of
from ztk.optim import TorchStep
from ztk.zero.state.named import local_range
from ztk.zero.update.piece_states import FROZEN, GRADIENT, MASTER

# In full


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The master weight; None for a parameter of no engine."""
    owner = owner_of(param)
    return None if owner is None else _read(owner, kind=weights_of(owner))


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The gradient that the coming step will use, before clipping: averaged, without loss scale.

    Between the backward at a boundary and `step()`. Inside `no_sync`: this rank's own sum so far, divided by the accumulation steps alone.
    None at other times and for a parameter of no engine.
    """
    owner = owner_of(param)
    if owner is None or not _trained(owner):
        return None
    gradient = _read(owner, kind=GRADIENT)
    if gradient is not None:
        return gradient / _divisor_of(owner)
    return None if owner.engine.synchronises else local_gradient(owner)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """State `optim_state_key` ("exp_avg", "exp_avg_sq", "momentum_buffer"); None for a parameter that is not trained.

    Raises ValueError for a state that the optimizer does not have.
    """
    owner = owner_of(param)
    if owner is None or not _trained(owner):
        return None
    _check_state(owner, key=optim_state_key)
    return _read(owner, kind=optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Sets the master weight and with it the parameter. value: the same on all ranks."""
    owner = _owned(param, value=value)
    _write(owner, value=value, kind=weights_of(owner))


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Sets the gradient that the coming step will use, as `safe_get_full_grad` gives it; norm and clipping follow.

    value: the same on all ranks. Raises ValueError if no step is due.
    """
    owner = _owned(param, value=value)
    _write(owner, value=_scaled(owner, value=value), kind=GRADIENT)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Sets one optimizer state. value: the same on all ranks.

    Raises ValueError for a frozen parameter, a state that the optimizer does not have, and another shape.
    """
    owner = _owned(param, value=value)
    if not _trained(owner):
        raise ValueError(f"parameter {owner.name} is frozen and has no optimizer states")
    _check_state(owner, key=optim_state_key, sets=True)
    _write(owner, value=value, kind=optim_state_key)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """The gradient of every trained parameter becomes `update_func(gradient, parameter)`. Every rank calls it with the same list."""
    for param in param_list:
        if param.requires_grad and (gradient := safe_get_full_grad(param)) is not None:
            safe_set_full_grad(param, update_func(gradient, param))


# What this rank keeps: what a `get` returns, a `set` takes; a `get` returns None for a frozen parameter.


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The master weights."""
    owner = _sharded(param)
    return _read(owner, kind=MASTER, local=True) if _trained(owner) else None


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """The gradient that the coming step will use, averaged, without loss scale: between the backward at a boundary and `step()`."""
    owner = _sharded(param)
    gradient = _read(owner, kind=GRADIENT, local=True) if _trained(owner) else None
    return None if gradient is None else gradient / _divisor_of(owner)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """One optimizer state."""
    owner = _sharded(param)
    if not _trained(owner):
        return None
    _check_state(owner, key=optim_state_key)
    return _read(owner, kind=optim_state_key, local=True)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Sets the master weights and with them the parameter; of a parameter that is never sharded all ranks must call it."""
    owner = _fitting(param, value=value)
    _write(owner, value=value, kind=weights_of(owner), local=True)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Sets the gradient, as `safe_get_local_grad` gives it. Raises ValueError if no step is due."""
    owner = _fitting(param, value=value)
    _write(owner, value=_scaled(owner, value=value), kind=GRADIENT, local=True)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Sets one optimizer state."""
    owner = _fitting(param, value=value)
    _check_state(owner, key=optim_state_key, sets=True)
    _write(owner, value=value, kind=optim_state_key, local=True)


def weights_of(owner: Owner) -> str:
    """The kind of state that a parameter's weights are."""
    return MASTER if _trained(owner) else FROZEN


def _read(owner: Owner, *, kind: str, local: bool = False) -> Tensor | None:
    state = owner.engine.zero.named_state
    return (state.read_local if local else state.read)(owner.bucket, name=owner.name, kind=kind)


def _write(owner: Owner, *, value: Tensor, kind: str, local: bool = False) -> None:
    state = owner.engine.zero.named_state
    if local:
        state.write_local(owner.bucket, name=owner.name, kind=kind, value=value)
    else:
        state.write(owner.bucket, values={owner.name: value}, kind=kind)


def _trained(owner: Owner) -> bool:
    return owner.bucket.traits.trainable


def _divisor_of(owner: Owner) -> Tensor:
    """A reduced gradient is larger by this scalar than the averaged, unscaled one."""
    control = owner.engine.control
    return control.loss_scale * control.gradient_divisor


def _scaled(owner: Owner, *, value: Tensor) -> Tensor:
    """`value` as the engine keeps a gradient. Raises ValueError unless there is a reduced one."""
    if not owner.engine.zero.named_state.has_gradient(owner.bucket):
        raise ValueError(
            f"parameter {owner.name} has no reduced gradient now: set it between the backward at a boundary and step()"
        )
    return value.detach().reshape(-1).to(owner.engine.process.device, torch.float32) * _divisor_of(owner)


def _owned(param: nn.Parameter, *, value: Tensor) -> Owner:
    """Whose the parameter is; raises ValueError if it is nobody's or `value` does not fit it."""
    owner = owner_of(param)
    if owner is None:
        raise ValueError("the parameter belongs to no engine; pass one of engine.module's, after initialize")
    if not isinstance(value, Tensor) or value.shape != param.shape:
        raise ValueError(f"value for {owner.name}: must be a tensor of shape {tuple(param.shape)}")
    return owner


def _sharded(param: nn.Parameter) -> Owner:
    owner = owner_of(param)
    if owner is None or not owner.engine.zero.policy.shards_parameters:
        raise ValueError(
            "local parts exist at stage 3 only, of an engine's parameters; use safe_get_full_* and safe_set_full_*"
        )
    return owner


def _fitting(param: nn.Parameter, *, value: Tensor) -> Owner:
    owner = _sharded(param)
    if not _trained(owner):
        raise ValueError(f"parameter {owner.name} is frozen: it has no master weights, gradient or optimizer states")
    expected = len(local_range(owner.bucket, name=owner.name))
    if not isinstance(value, Tensor) or value.numel() != expected:
        raise ValueError(f"value for {owner.name}: must be a tensor of {expected} elements, what this rank keeps of it")
    return owner


def _check_state(owner: Owner, *, key: str, sets: bool = False) -> None:
    """Raises ValueError for a state that the optimizer does not keep. sets: also for one that its first step would overwrite."""
    optimizer = owner.engine.zero.optimizer
    if sets and isinstance(optimizer, TorchStep) and local_range(owner.bucket, name=owner.name):
        owner.engine.zero.finish_update()
        if owner.name not in optimizer.progress():
            raise ValueError(
                f"parameter {owner.name}: has made no step yet, and {optimizer.options['class']} makes its states in the first one: set "
                "them after it"
            )
    names = optimizer.state_names
    if key not in names:
        raise ValueError(f"optim_state_key={key!r}: this optimizer keeps {', '.join(names) or 'no states'}")
