"""Which modules are gathered together, and which parameters share a flat buffer.

A unit is a module whose parameters are needed at the same time: each element of a `ModuleList`, `ModuleDict` or `Sequential`, or of a
module that says `children_are_units` (a transformer block), each module that says `is_one_unit`, each large leaf outside of them (an
embedding, a head), and the root, which keeps the rest and stays gathered while it runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ztk.runtime.part import Part

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
    """Parameters that share a flat buffer: of one unit, one dtype, all trained or all frozen, the same ranks holding them.

    axis: along which the buffer is sharded. counted: this rank's copy is the one that counts, see `Part.replica`. holders: see `Part`.
    """

    unit: str
    names: tuple[str, ...]
    dtype: torch.dtype
    trainable: bool
    persistent: bool  # never sharded, whatever the stage
    axis: str = "data"
    counted: bool = True
    holders: tuple[int, ...] = ()


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
    unit: UnitPlan,
    *,
    model: nn.Module,
    bucket_size: int,
    persistence_threshold: int = 0,
    parts: Mapping[str, Part] | None = None,
) -> list[BucketPlan]:
    """Cuts a unit's own parameters into buckets of at most `bucket_size` elements, in order of definition.

    parts: of the parameters that are not simply whole on all data-parallel ranks.
    """
    parameters, parts = dict(model.named_parameters()), parts or {}

    def kind(name: str) -> tuple:
        parameter = parameters[name]
        part = parts.get(name) or Part.everything(tuple(parameter.shape))
        common = parameter.dtype, parameter.requires_grad, parameter.numel() <= persistence_threshold
        return (
            *common,
            part.axis,
            part.replica == 0,
            part.holders,
            part.is_full,
        )  # the last so that all ranks cut alike

    plans = []
    for wanted in dict.fromkeys(kind(name) for name in unit.owned):
        dtype, trainable, persistent, axis, counted, holders, _ = wanted
        names = [name for name in unit.owned if kind(name) == wanted]
        for chunk in _cut(names, size_of=lambda name: parameters[name].numel(), limit=bucket_size):
            plans.append(
                BucketPlan(
                    unit=unit.name,
                    names=chunk,
                    dtype=dtype,
                    trainable=trainable,
                    persistent=persistent,
                    axis=axis,
                    counted=counted,
                    holders=holders,
                )
            )
    return plans


def _unit_modules(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    found = []
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        is_container = isinstance(module, _CONTAINERS) or getattr(module, "children_are_units", False)
        is_element = is_container and not isinstance(child, _CONTAINERS)
        own = sum(parameter.numel() for parameter in child.parameters(recurse=False))
        is_marked = getattr(child, "is_one_unit", False)
        if ((is_element or is_marked) and next(child.parameters(), None) is not None) or own > LARGE_LEAF:
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
