"""Types in DeepSpeed's checkpoints, which scripts allow with `torch.serialization.add_safe_globals`.

A file names a type by its module, so each type has DeepSpeed's module name. None of them runs code when a file is read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


def module_is(name: str) -> Callable[[type], type]:
    """Sets the module of a class to `name`, by which files and `add_safe_globals` find it."""

    def named(cls: type) -> type:
        cls.__module__ = name
        return cls

    return named


@module_is("deepspeed.utils.tensor_fragment")
@dataclass
class fragment_address:
    """`numel` elements of a flat buffer, starting at `start`."""

    numel: int
    start: int


@module_is("deepspeed.runtime.zero.config")
class ZeroStageEnum(int, Enum):
    """The ZeRO stages. A member equals its number, as in `zero_optimization.stage`."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3
