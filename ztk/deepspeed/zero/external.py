"""External parameters: those that a module uses though another one owns them.

DeepSpeed has to be told of them. ztk gathers a parameter wherever it is read, so the register is only kept: it is checked, and asked by
those who look into it.
"""

from collections.abc import ItemsView
from weakref import WeakKeyDictionary

from torch import nn

_external: WeakKeyDictionary[nn.Module, dict[int, nn.Parameter]] = (
    WeakKeyDictionary()
)  # module -> {id of the parameter: parameter}


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Notes that `module`'s forward uses `parameter`. Raises RuntimeError for anything but a module and a parameter."""
    _check(module, parameter)
    _external.setdefault(module, {})[id(parameter)] = parameter


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undoes `register_external_parameter`. Raises RuntimeError if the parameter is not registered."""
    _check(module, parameter)
    if _external.get(module, {}).pop(id(parameter), None) is None:
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} is not a registered external parameter of {type(module).__name__}; "
            "register_external_parameter(module, parameter) comes first"
        )


def external_parameters(module: nn.Module) -> ItemsView[int, nn.Parameter]:
    """What is registered for `module`: pairs of an id and a parameter."""
    return _external.get(module, {}).items()


def _check(module: object, parameter: object) -> None:
    if not isinstance(module, nn.Module):
        raise RuntimeError(f"module: must be a torch.nn.Module, not {type(module).__name__}")
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(f"parameter: must be a torch.nn.Parameter, not {type(parameter).__name__}")
