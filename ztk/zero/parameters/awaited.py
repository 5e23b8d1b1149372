"""A parameter whose new value is on its way: whatever asks torch for it first waits.

After a step of stages 1 and 2 the ranks gather what each has updated, and the next forward begins (`ZeroPolicy.overlap_gather`). Until a
bucket's gather has been awaited, the class of its parameters sees every torch function that gets one: it waits, the parameters have their usual
class again, and the function runs. Modules' attributes wait too, for functions that torch does not see (extensions in C++, scripted functions).
What neither sees is a parameter that a script has kept from before the step and gives to such a function between steps. A bucket is not awaited
late while a script has a view of one of its parameters, such as `p.data`.
A parameter has the dtype of its bucket.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ztk.zero.parameters.released import change_class

_WAIT = "_ztk_wait"  # an attribute of an awaited parameter
# Properties that say nothing of the values.
_WITHOUT_VALUES = frozenset({
    "grad", "requires_grad", "shape", "dtype", "device", "layout", "ndim", "is_leaf", "is_cuda", "is_meta", "is_sparse",
    "grad_fn", "names", "itemsize", "nbytes", "_version",
})  # fmt: skip


class _Awaited:
    """Mixed into the class of a parameter while its value is on its way."""

    _usual_class: type

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        of_property = getattr(function, "__self__", None) if function.__name__ in ("__get__", "__set__") else None
        if getattr(of_property, "__name__", "") not in _WITHOUT_VALUES:
            for value in (*args, *(kwargs or {}).values()):
                _arrive(value)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict) -> Any:
        _arrive(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _arrive(self)
        return self.__reduce_ex__(protocol)


def await_value(parameter: nn.Parameter, *, wait: Callable[[], None]) -> None:
    """`wait()` is called before the value of `parameter`, of any shape, is used; it has to call `arrived`."""
    parameter.__dict__[_WAIT] = wait
    change_class(parameter, make=_awaited)


def wait_for(parameter: nn.Parameter) -> None:
    """Returns when the value of `parameter`, of any shape, is there."""
    _arrive(parameter)


def arrived(parameter: nn.Parameter) -> None:
    """The value of `parameter`, of any shape, is there."""
    if isinstance(parameter, _Awaited):
        parameter.__class__ = parameter._usual_class
        del parameter.__dict__[_WAIT]


def _arrive(value: Any) -> None:
    """Waits for `value`, or for those in it."""
    if isinstance(value, _Awaited):
        wait = value.__dict__.get(_WAIT)
        if wait is not None:  # another thread has not just waited
            wait()
    elif isinstance(value, list | tuple):
        for item in value:
            _arrive(item)
    elif isinstance(value, dict):
        for item in value.values():
            _arrive(item)


@functools.cache
def _awaited(cls: type) -> type:
    return type(f"Awaited{cls.__name__}", (_Awaited, cls), {"__module__": __name__, "_usual_class": cls})
