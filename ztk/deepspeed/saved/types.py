"""Types of DeepSpeed that its checkpoints name: scripts allow them by `torch.serialization.add_safe_globals`.

A file names a type by its module, so each carries DeepSpeed's. None of them runs code when a file is read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


def module_is(name: str) -> Callable[[type], type]:
    """Makes `name` the module of a class: what files and `add_safe_globals` know it by."""

    def named(cls: type) -> type:
        cls.__module__ = name
        return cls

    return named


@module_is("deepspeed.utils.tensor_fragment")
@dataclass
class fragment_address:
    """`numel` elements of a flat buffer from `start` on."""

    numel: int
    start: int


@module_is("deepspeed.runtime.zero.config")
class ZeroStageEnum(int, Enum):
    """What ZeRO shards. A member equals its number, as in `zero_optimization.stage`."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3
