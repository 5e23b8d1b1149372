"""Which modules are gathered together, and which parameters share a flat buffer.

A unit is a module whose parameters are needed at the same time: each element of a `ModuleList`, `ModuleDict` or `Sequential` (a
transformer block), each large leaf outside of them (an embedding, a head), and the root, which keeps the rest and stays gathered while it
runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

LARGE_LEAF = 1 << 20  # elements; a leaf module with more is a unit of its own
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
ROOT = "root"  # the name of the unit that keeps the rest


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitPlan:
    """A unit before it has buffers. Names are those of `model.named_parameters()`; a tied parameter appears in every unit that uses it."""

    name: str
    module: nn.Module
    owned: tuple[str, ...]
    used: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketPlan:
    """Parameters that share a flat buffer: of one unit, one dtype, all trained or all frozen."""

    unit: str
    names: tuple[str, ...]
    dtype: torch.dtype
    trainable: bool
    persistent: bool  # never sharded, whatever the stage


def plan_units(model: nn.Module) -> list[UnitPlan]:
    """The units of `model` in the order of their definition, the root last."""
    canonical = {parameter: name for name, parameter in model.named_parameters()}
    owner: dict[nn.Parameter, str] = {}
    plans = []
    for name, module in [*_unit_modules(model), ("", model)]:
        own = [parameter for parameter in dict.fromkeys(module.parameters()) if parameter not in owner]
        owner.update((parameter, name) for parameter in own)
        used = own if module is model else list(dict.fromkeys(module.parameters()))
        plans.append(
            UnitPlan(
                name=name or ROOT,
                module=module,
                owned=tuple(canonical[parameter] for parameter in own),
                used=tuple(canonical[parameter] for parameter in used),
            )
        )
    return plans


def plan_buckets(
    unit: UnitPlan, *, model: nn.Module, bucket_size: int, persistence_threshold: int = 0
) -> list[BucketPlan]:
    """Cuts a unit's own parameters into buckets of at most `bucket_size` elements, in order of definition."""
    parameters = dict(model.named_parameters())

    def kind(name: str) -> tuple:
        parameter = parameters[name]
        return parameter.dtype, parameter.requires_grad, parameter.numel() <= persistence_threshold

    plans = []
    for dtype, trainable, persistent in dict.fromkeys(kind(name) for name in unit.owned):
        names = [name for name in unit.owned if kind(name) == (dtype, trainable, persistent)]
        for chunk in _cut(names, size_of=lambda name: parameters[name].numel(), limit=bucket_size):
            plans.append(
                BucketPlan(unit=unit.name, names=chunk, dtype=dtype, trainable=trainable, persistent=persistent)
            )
    return plans


def _unit_modules(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    found = []
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        is_element = isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS)
        own = sum(parameter.numel() for parameter in child.parameters(recurse=False))
        if (is_element and next(child.parameters(), None) is not None) or own > LARGE_LEAF:
            found.append((path, child))
        else:
            found.extend(_unit_modules(child, f"{path}."))
    return found


def _cut(names: Sequence[str], *, size_of: Callable[[str], int], limit: int) -> list[tuple[str, ...]]:
    chunks: list[list[str]] = [[]]
    total = 0
    for name in names:
        if chunks[-1] and total + size_of(name) > limit:
            chunks.append([])
            total = 0
        chunks[-1].append(name)
        total += size_of(name)
    return [tuple(chunk) for chunk in chunks if chunk]
