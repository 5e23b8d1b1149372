"""Leaf modules: all experts of a module are gathered together, because ranks send their tokens to different experts.

The units of stage 3 are the elements of module lists (see `ztk.zero.buckets.units`). Each expert would be a unit, and ranks would gather
different ones.
"""

from collections.abc import Iterator, Sequence

from torch import nn

from ztk.deepspeed.config.zero import LeafModules
from ztk.deepspeed.engine.owners import owner_of
from ztk.deepspeed.tools.log import logger


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Marks the modules of these classes (types, their names, or their full names) and returns them. Call it before `initialize`.

    Raises ValueError if none is found, unless raise_if_not_found is False.
    """
    return _mark_classes(model, leaf_module_classes, flag=True, raise_if_not_found=raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undoes `set_z3_leaf_modules`."""
    return _mark_classes(model, leaf_module_classes, flag=False, raise_if_not_found=raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Marks or unmarks this module. Raises RuntimeError for a module that an engine trains already."""
    owner = next((owner for p in model.parameters() if (owner := owner_of(p)) is not None), None)
    if owner is not None:
        raise RuntimeError(
            f"{type(model).__name__} belongs to an engine (parameter {owner.name}), whose units are settled: mark leaf modules "
            "before initialize"
        )
    model._z3_leaf = flag


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks modules by their names in `model.named_modules()`. Returns them, and the names that were not found."""
    modules = dict(model.named_modules())
    missing = [name for name in module_names if name not in modules]
    _check_found(missing, criterion="named", raises=raise_if_not_found)
    return _mark((modules[name] for name in module_names if name in modules), flag=flag), missing


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks modules by the ends of their names. Returns them, and the suffixes that were not found."""
    modules = dict(model.named_modules())
    missing = [suffix for suffix in module_name_suffixes if not any(name.endswith(suffix) for name in modules)]
    _check_found(missing, criterion="with names that end in", raises=raise_if_not_found)
    found = {module: None for name, module in modules.items() if name.endswith(tuple(module_name_suffixes))}
    return _mark(iter(found), flag=flag), missing


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the marked modules in `model`."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Returns whether this module is marked."""
    return getattr(model, "_z3_leaf", False)


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Returns whether the parameter is in a marked module of an engine."""
    owner = owner_of(model)
    if owner is None:
        return False
    return any(
        parameter is model for leaf in get_z3_leaf_modules(owner.engine.module) for parameter in leaf.parameters()
    )


def settle_units(model: nn.Module, *, leaves: LeafModules) -> None:
    """Marks the configured modules, and passes the marks to `ztk.zero.buckets.units`. Called by `initialize`."""
    missing = [name for name in leaves.classes if not _mark_classes(model, [name], flag=True, raise_if_not_found=False)]
    missing += set_z3_leaf_modules_by_name(model, leaves.names, raise_if_not_found=False)[1]
    missing += set_z3_leaf_modules_by_suffix(model, leaves.name_suffixes, raise_if_not_found=False)[1]
    unknown = [name for name in missing if name in leaves.wanted]
    if unknown:
        logger.warning("zero_optimization.leaf_module: the model has no module for %s", ", ".join(unknown))
    for module in model.modules():
        if hasattr(module, "_z3_leaf"):
            module.is_one_unit = module._z3_leaf


def _mark_classes(
    model: nn.Module, classes: Sequence[type | str], *, flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    wrong = [entry for entry in classes if not isinstance(entry, (type, str))]
    if wrong:
        raise ValueError(f"leaf_module_classes: must be classes or their names, not {wrong[0]!r}")
    types = tuple(entry for entry in classes if isinstance(entry, type))
    names = {entry for entry in classes if isinstance(entry, str)}

    def matches(module: nn.Module) -> bool:
        cls = type(module)
        return isinstance(module, types) or not names.isdisjoint({cls.__name__, f"{cls.__module__}.{cls.__qualname__}"})

    found = _mark((module for module in model.modules() if matches(module)), flag=flag)
    if not found:
        _check_found([str(entry) for entry in classes], criterion="of type", raises=raise_if_not_found)
    return found


def _mark(modules: Iterator[nn.Module], *, flag: bool) -> list[nn.Module]:
    found = list(modules)
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _check_found(missing: Sequence[str], *, criterion: str, raises: bool) -> None:
    if missing and raises:
        raise ValueError(f"the model has no modules {criterion} {', '.join(missing)}")
