"""Small functions of `deepspeed.runtime.utils` and `deepspeed.utils`: nested data, memory in use.

Norms have the dtype of the gradients.
"""

import functools
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from ztk.core.runtime.system_memory import machine_memory, process_memory
from ztk.deepspeed.tools.device import get_accelerator
from ztk.deepspeed.tools.log import logger, show_messages


def set_random_seed(seed: int) -> None:
    """Seeds random, numpy and torch."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Returns the object at a dotted name."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Sets the object at a dotted name."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


def move_to_device(item: Any, device: object, criterion_func: Callable[[object], bool] | None = None) -> Any:
    """Moves tensors in lists, tuples and dicts to a device. Tensors for which criterion_func is true keep their identity."""

    def moved(one: Any) -> Any:
        if criterion_func is not None and criterion_func(one):
            one.data = one.to(device).data
            return one
        return one.to(device) if hasattr(one, "to") else one

    return map_nested(item, moved)


def map_nested(item: Any, change: Callable[[Any], Any]) -> Any:
    """Returns `item` with change(value) in place of every value in its lists, tuples and dicts."""
    if isinstance(item, (list, tuple)):
        return type(item)([map_nested(value, change) for value in item])
    if isinstance(item, dict):
        return {key: map_nested(value, change) for key, value in item.items()}
    return change(item)


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0, mpu: None = None
) -> Tensor:
    """Clips `.grad` of a plain model and returns the norm, a scalar. An engine clips by itself; see `gradient_clipping`.

    Raises ValueError for an mpu, because only the engine computes norms over ranks.
    """
    if mpu is not None:
        raise ValueError(
            "mpu: not offered here; set gradient_clipping in the configuration, which clips over all ranks"
        )
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)


def instrument_w_nvtx(func: Callable) -> Callable:
    """A decorator that makes every call a range in a GPU profiler."""

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
    """A context in which floating-point tensors of a model get this dtype and device, with "meta" for tensors without memory."""

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


GIB = 2**30


def empty_cache() -> None:
    """Frees the GPU allocator's cached memory and resets its peaks."""
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


def see_memory_usage(message: str, force: bool = False) -> None:
    """Logs the GPU's and the machine's memory after `message` on rank 0, and resets the GPU's peaks. Does nothing unless `force`."""
    if not force or (dist.is_initialized() and dist.get_rank()):
        return
    show_messages(None)
    logger.info(message)
    if not get_accelerator().is_synchronized_device():  # on a GPU
        device = get_accelerator()
        most, most_reserved = device.max_memory_allocated() / GIB, device.max_memory_reserved() / GIB
        allocated, reserved = device.memory_allocated() / GIB, device.memory_reserved() / GIB
        words = "MA %.2f GB, max MA %.2f GB, CA %.2f GB, max CA %.2f GB"
        logger.info(words, allocated, most, reserved, most_reserved)
        get_accelerator().reset_peak_memory_stats()
    host, own = machine_memory(), process_memory()
    used = host["MemTotal"] - host["MemAvailable"]
    logger.info(
        "CPU virtual memory: used = %.2f GB, percent = %.1f%%, this process = %.2f GB",
        used / GIB,
        100 * used / host["MemTotal"],
        own["VmRSS"] / GIB,
    )
