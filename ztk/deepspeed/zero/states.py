"""safe_get/set: one parameter's weight, gradient or optimizer state in fp32, in full or this rank's part.

Functions for full tensors have the shapes of the full parameter and are collective calls. `..._local_...` functions are local and need
stage 3, as in DeepSpeed. ztk shards flat buffers of many parameters, so a rank may have any range of a parameter's elements, including
none or all of them, in the flat shape [n]. Values to set may have any floating-point dtype.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ztk.deepspeed.engine.gradients import divisor_of, local_gradient
from ztk.deepspeed.engine.owners import Owner, owner_of
from ztk.optim import TorchStep, WholeStep
from ztk.optim.states import FROZEN, GRADIENT, MASTER
from ztk.train.engine.engine import LIVE

# Full tensors


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Returns the master weight, or None for a parameter without an engine."""
    owner = owner_of(param) or _owner_in_loop(param)
    return None if owner is None else _read(owner, kind=weights_of(owner))


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Returns the gradient for the next step, before clipping: averaged, without loss scale.

    Available between the backward at a boundary and `step()`. Inside `no_sync`, returns this rank's local sum so far, divided only by the
    accumulation steps. Otherwise, and for a parameter without an engine, returns None.
    """
    owner = owner_of(param) or _owner_in_loop(param)
    if owner is None or not owner.is_trained:
        return None
    gradient = _read(owner, kind=GRADIENT)
    if gradient is not None:
        return gradient / divisor_of(owner.engine)
    return None if owner.engine.synchronises else local_gradient(owner)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Returns state `optim_state_key` ("exp_avg", "exp_avg_sq", "momentum_buffer"), or None for a parameter that is not trained.

    Raises ValueError for a state that the optimizer does not have.
    """
    owner = owner_of(param)
    if owner is None or not owner.is_trained:
        return None
    if isinstance(owner.engine.zero.optimizer, WholeStep):
        return _whole_state(param, owner=owner, key=optim_state_key)
    _check_state(owner, key=optim_state_key)
    return _read(owner, kind=optim_state_key)


def _whole_state(param: nn.Parameter, *, owner: Owner, key: str, value: Tensor | None = None) -> Tensor:
    """Returns a copy of a state of an optimizer of full parameters, after setting it to `value` if that is given."""
    with owner.engine.zero.whole_states() as step:
        state = step.state.get(param, {})
        if not isinstance(state.get(key), Tensor):
            tensors = [name for name, kept in state.items() if isinstance(kept, Tensor)]
            raise ValueError(f"optim_state_key={key!r}: this optimizer keeps {', '.join(tensors) or 'no states yet'}")
        if value is not None:
            state[key].copy_(value)
        return state[key].clone()


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Sets the master weight and the parameter. value: the same on all ranks."""
    owner = _owned(param, value=value)
    _write(owner, value=value, kind=weights_of(owner))


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Sets the gradient for the next step, in the scale of `safe_get_full_grad`. Affects the norm and clipping.

    value: the same on all ranks. Raises ValueError if no step is due.
    """
    owner = _owned(param, value=value)
    _write(owner, value=_scaled(owner, value=value), kind=GRADIENT)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Sets one optimizer state. value: the same on all ranks.

    Raises ValueError for a frozen parameter, an unknown state, and another shape.
    """
    owner = _owned(param, value=value)
    if not owner.is_trained:
        raise ValueError(f"parameter {owner.name} is frozen and has no optimizer states")
    if isinstance(owner.engine.zero.optimizer, WholeStep):
        _whole_state(param, owner=owner, key=optim_state_key, value=value)
        return
    _check_state(owner, key=optim_state_key, sets=True)
    _write(owner, value=value, kind=optim_state_key)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replaces the gradient of every trained parameter by `update_func(gradient, parameter)`.

    A collective call with the same list on all ranks.
    """
    for param in param_list:
        if param.requires_grad and (gradient := safe_get_full_grad(param)) is not None:
            safe_set_full_grad(param, update_func(gradient, param))


# This rank's parts. `set` functions take the results of `get` functions, which return None for a frozen parameter.


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Returns the master weights."""
    owner = _sharded(param)
    return _read(owner, kind=MASTER, local=True) if owner.is_trained else None


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Returns the gradient for the next step, averaged, without loss scale: between the backward at a boundary and `step()`."""
    owner = _sharded(param)
    gradient = _read(owner, kind=GRADIENT, local=True) if owner.is_trained else None
    return None if gradient is None else gradient / divisor_of(owner.engine)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Returns one optimizer state."""
    owner = _sharded(param)
    if not owner.is_trained:
        return None
    _check_state(owner, key=optim_state_key)
    return _read(owner, kind=optim_state_key, local=True)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Sets the master weights and the parameter. For a parameter that is never sharded, all ranks must call it."""
    owner = _fitting(param, value=value)
    _write(owner, value=value, kind=weights_of(owner), local=True)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Sets the gradient in the scale of `safe_get_local_grad`. Raises ValueError if no step is due."""
    owner = _fitting(param, value=value)
    _write(owner, value=_scaled(owner, value=value), kind=GRADIENT, local=True)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Sets one optimizer state."""
    owner = _fitting(param, value=value)
    _check_state(owner, key=optim_state_key, sets=True)
    _write(owner, value=value, kind=optim_state_key, local=True)


def _owner_in_loop(param: nn.Parameter) -> Owner | None:
    """Returns the owner of a parameter whose engine `initialize` has not made, such as one of `ztk.Loop`."""
    for engine in LIVE:
        for bucket in engine.zero.buckets:
            for own, placement in zip(bucket.parameters, bucket.layout.placements, strict=True):
                if own is param:
                    return Owner(engine=engine, bucket=bucket, name=placement.name, number=0)
    return None


def weights_of(owner: Owner) -> str:
    """Returns the kind of state that holds a parameter's weights."""
    return MASTER if owner.is_trained else FROZEN


def _read(owner: Owner, *, kind: str, local: bool = False) -> Tensor | None:
    state = owner.engine.zero.named_state
    return (state.read_local if local else state.read)(owner.bucket, name=owner.name, kind=kind)


def _write(owner: Owner, *, value: Tensor, kind: str, local: bool = False) -> None:
    state = owner.engine.zero.named_state
    if local:
        state.write_local(owner.bucket, name=owner.name, kind=kind, value=value)
    else:
        state.write(owner.bucket, values={owner.name: value}, kind=kind)


def _scaled(owner: Owner, *, value: Tensor) -> Tensor:
    """Returns `value` in the engine's scale of a gradient. Raises ValueError unless there is a reduced one."""
    if not owner.engine.zero.named_state.has_gradient(owner.bucket):
        raise ValueError(
            f"parameter {owner.name} has no reduced gradient now: set it between the backward at a boundary and step()"
        )
    return value.detach().reshape(-1).to(owner.engine.process.device, torch.float32) * divisor_of(owner.engine)


def _owned(param: nn.Parameter, *, value: Tensor) -> Owner:
    """Returns the parameter's owner. Raises ValueError if there is none, or if `value` does not fit."""
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
    if not owner.is_trained:
        raise ValueError(f"parameter {owner.name} is frozen: it has no master weights, gradient or optimizer states")
    expected = len(owner.bucket.local_range(owner.name))
    if not isinstance(value, Tensor) or value.numel() != expected:
        raise ValueError(f"value for {owner.name}: must be a tensor of {expected} elements, this rank's part")
    return owner


def _check_state(owner: Owner, *, key: str, sets: bool = False) -> None:
    """Raises ValueError for a state that the optimizer does not have. sets: also for one that its first step would overwrite."""
    optimizer = owner.engine.zero.optimizer
    if isinstance(optimizer, WholeStep):
        raise ValueError(
            f"optim_state_key={key!r}: {optimizer.name} steps full parameters and keeps full states on every rank: use "
            "safe_get_full_optimizer_state and safe_set_full_optimizer_state"
        )
    if sets and isinstance(optimizer, TorchStep) and owner.bucket.local_range(owner.name):
        owner.engine.zero.finish_update()
        if owner.name not in optimizer.progress():
            raise ValueError(
                f"parameter {owner.name}: has made no step yet, and {optimizer.options['class']} makes its states in the first one: set "
                "them after it"
            )
    names = optimizer.state_names
    if key not in names:
        raise ValueError(f"optim_state_key={key!r}: this optimizer keeps {', '.join(names) or 'no states'}")
