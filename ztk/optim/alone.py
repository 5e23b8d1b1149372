"""Runs one step of a torch optimizer's class on other tensors than the ones that its parameters hold."""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

_OF_ENGINE = ("_ztk_", "_data_was_read", "ds_")  # prefixes of attributes that engines set on parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Filled:
    """A state with an element per element of its parameter, all equal to `value` [] of the state's dtype."""

    value: Tensor


def initial_state(state: Mapping[str, Any], *, parameter: Tensor) -> dict[str, Any] | None:
    """The state that a class sets in its constructor for a parameter of any shape, as input of `fill`. None if it cannot be a first
    state."""
    made = {}
    for key, value in state.items():
        made[key] = value
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.numel() and key != "step":
            first = value.detach().reshape(-1)[0]
            if not bool((value == first).all()):
                return None
            made[key] = Filled(value=first.clone())
    return None if float(made.get("step") or 0) else made


def fill(state: Mapping[str, Any], *, parameter: Tensor) -> dict[str, Any]:
    """The first state of `parameter` (any shape), from the result of `initial_state`."""
    return {
        key: value.value.to(parameter.device).expand(parameter.shape).clone()
        if isinstance(value, Filled)
        else copy.deepcopy(value)
        for key, value in state.items()
    }


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters. Tensors, such as a rate that a scheduler fills, are copied."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"
    }


def attributes_of(parameter: nn.Parameter) -> dict[str, Any]:
    """The attributes that a script has set on a parameter (`p.lr_scale = 0.1`), for the ranges of it that a step updates.

    A tensor of several elements is replaced by an object that raises a TypeError when a step uses it, because the mapping of its elements
    to a range is unknown.
    """
    return {
        name: _Uncut(name) if _has_elements(value) else value
        for name, value in vars(parameter).items()
        if not name.startswith(_OF_ENGINE)
    }


def stand_in(value: Tensor, *, attributes: Mapping[str, Any]) -> nn.Parameter:
    """A parameter over the memory of `value` [n] with the given `attributes`, to pass to a step."""
    made = nn.Parameter(value)
    vars(made).update(attributes)
    return made


# Torch's own attributes, because an engine's classes of parameters have properties of these names.
# pyrefly: ignore[missing-attribute]  # a descriptor of the class at run time
_DATA: Any = torch.Tensor.data
_GRADIENT: Any = torch.Tensor.grad


@dataclass(frozen=True, kw_only=True, slots=True)
class Lent:
    """Class, memory and gradient of a parameter object before `lend`."""

    cls: type
    value: Tensor
    gradient: Tensor | None


def lend(parameter: nn.Parameter, *, value: Tensor, gradient: Tensor | None) -> Lent:
    """Gives the object `parameter` the memory of `value` and the gradient (any shape), and the class that it had without an engine.

    A step may know parameters by identity, so it gets the objects themselves. Call it without torch function subclasses.
    """
    lent = Lent(cls=type(parameter), value=_DATA.__get__(parameter), gradient=_GRADIENT.__get__(parameter))
    parameter.__class__ = next(base for base in type(parameter).__mro__ if not base.__module__.startswith("ztk."))
    _GRADIENT.__set__(parameter, None)
    _DATA.__set__(parameter, value)
    _GRADIENT.__set__(parameter, gradient)
    return lent


def take_back(parameter: nn.Parameter, *, lent: Lent) -> Tensor:
    """Restores the object after `lend`. Returns its value, of any shape."""
    value = _DATA.__get__(parameter)
    _GRADIENT.__set__(parameter, None)
    _DATA.__set__(parameter, lent.value)
    _GRADIENT.__set__(parameter, lent.gradient)
    parameter.__class__ = lent.cls
    return value


class _Uncut:
    """An attribute of a parameter that cannot be cut to a range."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        next(item for item in (*args, *(kwargs or {}).values()) if isinstance(item, cls))._refuse()

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(
            f"the attribute {self._name} of a parameter is a tensor, and a step over a range of a parameter cannot cut it: keep it in "
            "state[parameter]"
        )

    __getitem__ = __iter__ = __bool__ = __len__ = __float__ = __call__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse


def _has_elements(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_elements, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_has_elements, value))
    return isinstance(value, nn.Module) or (isinstance(value, Tensor) and value.numel() > 1)


def step_alone(
    optimizer: torch.optim.Optimizer,
    *,
    groups: list[dict[str, Any]],
    states: dict[nn.Parameter, dict[str, Any]],
    cls: type | None = None,
) -> dict[str, Any]:
    """Calls the step of the optimizer's class over `groups`, and returns the attributes of the object that it was called on.

    groups: replaces `param_groups`; the parameters have gradients. states: replaces `state`. Both are changed in place. `optimizer` is not
    changed, except by a class that changes an object held in an attribute, and its hooks are not called. cls: class of the temporary
    object. Defaults to the optimizer's.
    """
    alone: Any = object.__new__(cls or type(optimizer))
    alone.__dict__.update(optimizer.__dict__)
    alone.__dict__.pop("step", None)  # a scheduler wraps the object's method to detect calls
    alone._optimizer_step_pre_hooks, alone._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    alone.param_groups, alone.state = groups, defaultdict(dict, states)
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):  # torch's wrapper, which profiles and calls the hooks of all optimizers
        step = step.__wrapped__
    with torch.no_grad():
        step(alone)
    states.update(alone.state)
    return alone.__dict__
