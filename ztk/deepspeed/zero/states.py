"""safe_get/set: one parameter's full weight, gradient or optimizer state in fp32.

Shapes of what is read and set are those of the full parameter. Collective calls: every rank makes them alike.
Values that are set have any floating-point dtype."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ztk.deepspeed.engine.gradients import local_gradient
from ztk.deepspeed.engine.owners import Owner, owner_of
from ztk.optim import TorchStep
from ztk.zero.state.named import local_range
from ztk.zero.update.piece_states import FROZEN, GRADIENT, MASTER


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The master weight, fp32, in the parameter's shape; None for a parameter of no engine."""
    owner = owner_of(param)
    if owner is None:
        return None
    return owner.engine.zero.named_state.read(owner.bucket, name=owner.name, kind=weights_of(owner))


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The gradient that the coming step will use, before clipping: averaged, without loss scale.

    Between the backward at a boundary and `step()`. Inside `no_sync`: this rank's own sum so far, divided by the accumulation steps alone.
    None at other times and for a parameter of no engine.
    """
    owner = owner_of(param)
    if owner is None or not owner.bucket.traits.trainable:
        return None
    gradient = owner.engine.zero.named_state.read(owner.bucket, name=owner.name, kind=GRADIENT)
    if gradient is not None:
        return gradient / divisor_of(owner)
    return None if owner.engine.synchronises else local_gradient(owner)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """State `optim_state_key` ("exp_avg", "exp_avg_sq", "momentum_buffer"), fp32; None for a parameter that is not trained.

    Raises ValueError for a state that the optimizer does not have.
    """
    owner = owner_of(param)
    if owner is None or not owner.bucket.traits.trainable:
        return None
    check_state(owner, key=optim_state_key)
    return owner.engine.zero.named_state.read(owner.bucket, name=owner.name, kind=optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Sets the master weight and with it the parameter. value: in the parameter's shape, the same on all ranks."""
    owner = owned(param, value=value)
    owner.engine.zero.named_state.write(owner.bucket, values={owner.name: value}, kind=weights_of(owner))


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Sets one optimizer state. value: in the parameter's shape, the same on all ranks.

    Raises ValueError for a frozen parameter, a state that the optimizer does not have, and another shape.
    """
    owner = owned(param, value=value)
    if not owner.bucket.traits.trainable:
        raise ValueError(f"parameter {owner.name} is frozen and has no optimizer states")
    check_state(owner, key=optim_state_key, sets=True)
    owner.engine.zero.named_state.write(owner.bucket, values={owner.name: value}, kind=optim_state_key)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Sets the gradient that the coming step will use, as `safe_get_full_grad` gives it; norm and clipping follow.

    value: in the parameter's shape, the same on all ranks. Raises ValueError if no step is due.
    """
    owner = owned(param, value=value)
    need_gradient(owner)
    scaled = value.detach().reshape(-1).to(owner.engine.process.device, torch.float32) * divisor_of(owner)
    owner.engine.zero.named_state.write(owner.bucket, values={owner.name: scaled}, kind=GRADIENT)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """The gradient of every trained parameter becomes `update_func(gradient, parameter)`. Every rank calls it with the same list."""
    for param in param_list:
        if param.requires_grad and (gradient := safe_get_full_grad(param)) is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def divisor_of(owner: Owner) -> Tensor:
    """What a reduced gradient is larger by, a scalar, than the averaged, unscaled one."""
    control = owner.engine.control
    return control.loss_scale * control.gradient_divisor


def weights_of(owner: Owner) -> str:
    """The kind of state that a parameter's weights are."""
    return MASTER if owner.bucket.traits.trainable else FROZEN


def owned(param: nn.Parameter, *, value: Tensor) -> Owner:
    """Whose the parameter is; raises ValueError if it is nobody's or `value` does not fit it."""
    owner = owner_of(param)
    if owner is None:
        raise ValueError("the parameter belongs to no engine; pass one of engine.module's, after initialize")
    if not isinstance(value, torch.Tensor) or value.shape != param.shape:
        raise ValueError(f"value for {owner.name}: must be a tensor of shape {tuple(param.shape)}")
    return owner


def need_gradient(owner: Owner) -> None:
    """Raises ValueError unless there is a reduced gradient."""
    if not owner.engine.zero.named_state.has_gradient(owner.bucket):
        raise ValueError(
            f"parameter {owner.name} has no reduced gradient now: set it between the backward at a boundary and step()"
        )


def check_state(owner: Owner, *, key: str, sets: bool = False) -> None:
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
