"""Small functions of `deepspeed.runtime.utils` and `deepspeed.utils` that scripts import.

A norm has the dtype of the gradients.
"""

import functools
import os
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch
from torch import Tensor

from ztk.deepspeed.device import get_accelerator


def set_random_seed(seed: int) -> None:
    """Of random, numpy and torch."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def ensure_directory_exists(filename: str) -> None:
    """The folder of a file."""
    os.makedirs(os.path.dirname(filename) or ".", exist_ok=True)


def recursive_getattr(model: Any, module_name: str) -> Any:
    """The object at a dotted name."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Sets the object at a dotted name."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


def move_to_device(item: Any, device: object, criterion_func: Callable[[object], bool] | None = None) -> Any:
    """Tensors in lists, tuples and dicts to a device. What criterion_func is true for keeps being the same tensor object."""
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device).data
        return item
    if isinstance(item, (list, tuple)):
        return type(item)([move_to_device(value, device, criterion_func) for value in item])
    if isinstance(item, dict):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    return item.to(device) if hasattr(item, "to") else item


def copy_to_device(item: Any, device: object, criterion_func: Callable[[object], bool]) -> Any:
    """Copies of what criterion_func is true for, in lists, tuples and dicts; the rest as it is."""
    if criterion_func(item):
        return item.to(device)
    if isinstance(item, (list, tuple)):
        return type(item)([copy_to_device(value, device, criterion_func) for value in item])
    if isinstance(item, dict):
        return {key: copy_to_device(value, device, criterion_func) for key, value in item.items()}
    return item


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0, mpu: None = None
) -> Tensor:
    """Clips `.grad` of a plain model and returns the norm, a scalar. An engine clips by itself, see `gradient_clipping`.

    Raises ValueError for an mpu: parts of parameters on several ranks have their norm in the engine alone.
    """
    if mpu is not None:
        raise ValueError(
            "mpu: not offered here; set gradient_clipping in the configuration, which clips over all ranks"
        )
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)


def call_to_str(base: str, *args: object, **kwargs: object) -> str:
    """`base(1, key=2)`."""
    words = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
    return f"{base}({', '.join(words)})"


def get_only_unique_item(items: Iterable) -> object:
    """Raises RuntimeError unless all items are equal."""
    found = set(items)
    if len(found) != 1:
        raise RuntimeError(f"expected one value, found {sorted(map(str, found))}")
    return found.pop()


def instrument_w_nvtx(func: Callable) -> Callable:
    """A decorator: every call is a range that a GPU profiler shows."""

    @functools.wraps(func)
    def call(*args, **kwargs):
        accelerator = get_accelerator()
        accelerator.range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            accelerator.range_pop()

    return call


class OnDevice:
    """A context: floating-point tensors that a model makes have this dtype and lie on this device, "meta" for no memory at all."""

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._place: torch.device | None = None
        self._before: torch.dtype | None = None

    def __enter__(self) -> "OnDevice":
        if self.enabled:
            self._before, self._place = torch.get_default_dtype(), torch.device(self.device)
            torch.set_default_dtype(self.dtype)
            self._place.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.enabled:
            assert self._place is not None
            self._place.__exit__(*error)
            torch.set_default_dtype(self._before)
