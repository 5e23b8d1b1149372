"""One step of a torch optimizer's class over tensors that are not its own."""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Filled:
    """A state with an element per element of its parameter, all of them `value` [] of the state's dtype."""

    value: Tensor


def initial_state(state: Mapping[str, Any], *, parameter: Tensor) -> dict[str, Any] | None:
    """What a class sets in its constructor, for a parameter of any shape: see `fill`. None if it is no first state."""
    made = {}
    for key, value in state.items():
        made[key] = value
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.numel() > 1:
            first = value.detach().reshape(-1)[0]
            if not bool((value == first).all()):
                return None
            made[key] = Filled(value=first.clone())
    return None if float(made.get("step") or 0) else made


def fill(state: Mapping[str, Any], *, parameter: Tensor) -> dict[str, Any]:
    """The first state of `parameter`, of any shape, of what `initial_state` found."""
    return {
        key: value.value.to(parameter.device).expand(parameter.shape).clone()
        if isinstance(value, Filled)
        else copy.deepcopy(value)
        for key, value in state.items()
    }


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters. Tensors, such as a rate that a schedule fills, are copied."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"
    }


def step_alone(
    optimizer: torch.optim.Optimizer, *, groups: list[dict[str, Any]], states: dict[nn.Parameter, dict[str, Any]]
) -> dict[str, Any]:
    """Calls the step of the optimizer's class over `groups`, and returns the attributes of the object that it was called on.

    groups: as `param_groups`, their parameters with gradients. states: as `state`; both are changed in place. `optimizer` is not changed,
    except by a class that changes an object behind an attribute, and its hooks are not called.
    """
    alone = object.__new__(type(optimizer))
    alone.__dict__.update(optimizer.__dict__)
    alone.__dict__.pop("step", None)  # a scheduler wraps the method of the object, to see that it was called
    alone._optimizer_step_pre_hooks, alone._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    alone.param_groups, alone.state = groups, defaultdict(dict, states)
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):  # torch's wrapper, which profiles and calls the hooks of all optimizers
        step = step.__wrapped__
    with torch.no_grad():
        step(alone)
    states.update(alone.state)
    return alone.__dict__
