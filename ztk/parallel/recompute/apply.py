"""Selection of the modules to recompute."""

import functools
import re

from torch import nn

from ztk.core.policies.recompute import RecomputeMode, RecomputePolicy
from ztk.core.runtime import Comm, MemoryLedger
from ztk.core.runtime.own_forward import replace_forward
from ztk.parallel.recompute.region import Contexts, Regions

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def recompute_blocks(
    model: nn.Module,
    *,
    policy: RecomputePolicy,
    comm: Comm | None = None,
    ledger: MemoryLedger | None = None,
    is_stage: bool = False,
    around: Contexts | None = None,
) -> list[str]:
    """Turns the forwards of `model`'s blocks into regions and returns the blocks' names. Called after ZeRO has wrapped the forwards.

    comm: communicates between the tensor-parallel ranks for `partition_inputs`. ledger: counts the saved inputs as "recompute inputs".
    is_stage: `model` has only some modules of a model that `blocks` has accepted, and may have no block. around: see `Regions`.
    Raises ValueError if the policy finds no block, for `partition_inputs` without tensor-parallel ranks, and for a Hugging Face model that
    fills a cache while it trains.
    """
    if policy.mode is RecomputeMode.none:
        return []
    if policy.partition_inputs and (comm is None or comm.size == 1):
        raise ValueError(
            "recompute.partition_inputs=true has no effect without tensor-parallel ranks: leave it out, or use topology.tensor=2 or more"
        )
    if getattr(getattr(model, "config", None), "use_cache", False):
        raise ValueError(
            "recompute: model.config.use_cache is true, and a block that runs twice would add to the cache twice; set "
            "model.config.use_cache = False before training (`generate` may still ask for one)"
        )
    chosen = (_blocks(model, policy=policy) if is_stage else blocks(model, policy=policy))[:: policy.every]
    regions = Regions(policy, num_regions=len(chosen), comm=comm, ledger=ledger, around=around)
    for _, module in chosen:
        _wrap(module, regions=regions)
    return [name for name, _ in chosen]


def blocks(model: nn.Module, *, policy: RecomputePolicy) -> list[tuple[str, nn.Module]]:
    """The modules that may be recomputed, in order of definition, each once.

    Raises ValueError for a pattern that matches nothing, and for a model without blocks.
    """
    found = _blocks(model, policy=policy)
    for pattern in policy.modules:
        if not any(re.fullmatch(pattern, name) for name, _ in found):
            raise ValueError(f"recompute.modules={pattern!r}: no module has such a name")
    if not found:
        raise ValueError(
            "recompute: the model has no ModuleList, ModuleDict or Sequential of blocks (modules that have submodules); put the blocks into "
            "one, use recompute=none, or, in a script, name the modules by RecomputePolicy(modules=[r'encoder\\.layer\\.\\d+'])"
        )
    return found


def _blocks(model: nn.Module, *, policy: RecomputePolicy) -> list[tuple[str, nn.Module]]:
    if not policy.modules:
        return _elements(model)
    found = [(name, m) for name, m in model.named_modules() if any(re.fullmatch(p, name) for p in policy.modules)]
    for outer, _ in found:
        for inner, _ in found:
            if inner.startswith(f"{outer}."):
                raise ValueError(
                    f"recompute.modules: {inner} lies inside {outer}, which repeats it anyway; name one of them"
                )
    return found


def _elements(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Elements of the outermost containers, and layers of a PipelineModule, that have parameters and submodules, as transformer blocks
    have."""
    found: dict[nn.Module, str] = {}

    def visit(module: nn.Module, *, prefix: str) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            is_container = isinstance(module, _CONTAINERS) or getattr(module, "children_are_units", False)
            is_element = is_container and not isinstance(child, _CONTAINERS)
            has_parameters = next(child.parameters(), None) is not None
            if is_element and has_parameters and next(child.children(), None) is not None:
                found.setdefault(child, path)
            else:
                visit(child, prefix=f"{path}.")

    visit(model, prefix="")
    return [(path, module) for module, path in found.items()]


def _wrap(module: nn.Module, *, regions: Regions) -> None:
    original = module.forward

    @functools.wraps(original)
    def forward(*args, **kwargs):
        return regions.run(original, args=args, kwargs=kwargs)

    replace_forward(module, by=forward)
