"""Groups of modules that are gathered together, and of parameters that share a flat buffer.

A unit is a module whose parameters are needed at the same time: each element of a `ModuleList`, `ModuleDict` or `Sequential`, or of a
module with `children_are_units` (a transformer block), each module with `is_one_unit`, each large leaf outside of them (an
embedding, a head), and the root, which has the rest and stays gathered while it runs.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ztk.core.runtime.part import Part

LARGE_LEAF = 1 << 20  # elements; a leaf module with more is a unit of its own
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
ROOT = "root"  # the name of the unit with the remaining parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitPlan:
    """A unit before it has buffers. Names are as in `model.named_parameters()`; a tied parameter appears in every unit that uses it."""

    name: str
    module: nn.Module
    owned: tuple[str, ...]
    used: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketKind:
    """Properties that all parameters of one bucket share.

    persistent: never sharded, at any stage. axis: along which the buffer is sharded. counted: this rank's copy counts, see
    `Part.replica`. holders: see `Part`. is_full: the rank holds all of each parameter; a separate kind, so that all ranks cut buckets
    alike. is_float8: products read the parameters in float8 only.
    """

    dtype: torch.dtype
    trainable: bool
    persistent: bool
    axis: str
    counted: bool
    holders: tuple[int, ...]
    is_full: bool
    is_float8: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketPlan:
    """Parameters of one unit and one kind that share a flat buffer."""

    unit: str
    names: tuple[str, ...]
    kind: BucketKind


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketTraits:
    """Constant properties of a bucket.

    holders: pipeline ranks whose gradients of this bucket are added up, see `Part`.
    counted: this rank's copy counts in the gradient norm and in checkpoints; False if a rank outside the shard group has the same copy.
    """

    name: str
    unit: str
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    trainable: bool
    shards_parameters: bool
    shards_gradients: bool
    holders: tuple[int, ...] = ()
    counted: bool = True


def order_of_use(traits: BucketTraits) -> bool:
    """Sort key of buckets in the order of definition: the root's first, because the next forward starts there."""
    return traits.unit != ROOT


def plan_units(model: nn.Module) -> list[UnitPlan]:
    """The units of `model` in the order of their definition, the root last."""
    canonical = {parameter: name for name, parameter in model.named_parameters()}
    owner: dict[nn.Parameter, str] = {}
    plans = []
    parts = [] if getattr(model, "is_one_unit", False) else _unit_modules(model)
    for name, module in [*parts, ("", model)]:
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
    float8: Container[str] = (),
) -> list[BucketPlan]:
    """Cuts a unit's own parameters into buckets of at most `bucket_size` elements, in order of definition.

    parts: this rank's parts of parameters that are not full on all data-parallel ranks. float8: names of parameters that only float8
    products read.
    """
    parameters, parts = dict(model.named_parameters()), parts or {}

    def kind_of(name: str) -> BucketKind:
        parameter = parameters[name]
        part = parts.get(name) or Part.everything(tuple(parameter.shape))
        return BucketKind(
            dtype=parameter.dtype,
            trainable=parameter.requires_grad,
            persistent=parameter.numel() <= persistence_threshold,
            axis=part.axis,
            counted=part.replica == 0,
            holders=part.holders,
            is_full=part.is_full,
            is_float8=name in float8,
        )

    kinds = {name: kind_of(name) for name in unit.owned}
    plans = []
    for kind in dict.fromkeys(kinds.values()):
        names = [name for name in unit.owned if kinds[name] == kind]
        chunks = _cut(names, size_of=lambda name: parameters[name].numel(), limit=bucket_size)
        plans += [BucketPlan(unit=unit.name, names=chunk, kind=kind) for chunk in chunks]
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
