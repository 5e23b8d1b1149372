"""Small names of `deepspeed.runtime.engine` and its neighbours that other projects import."""

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

if TYPE_CHECKING:
    from ztk.deepspeed.engine import DeepSpeedEngine

DeepSpeedOptimizerCallable = Callable[
    [Iterable], Optimizer
]  # what `initialize(optimizer=...)` takes besides an optimizer
DeepSpeedSchedulerCallable = Callable[[Optimizer], LRScheduler]

# Of the build: nothing is compiled before it is used, and 0.0 sends readers to torch itself.
installed_ops: dict[str, bool] = {}
accelerator_name = ""
torch_info = dict.fromkeys(("version", "cuda_version", "nccl_version", "hip_version"), "0.0")


def autocast_if_enabled(engine: "DeepSpeedEngine") -> contextlib.AbstractContextManager:
    """The autocast of the engine's forward: `torch_autocast` of its configuration."""
    return engine.autocast()


def is_zero_param(parameter: object) -> bool:
    """A parameter of stage 3, or built under `zero.Init`."""
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")
