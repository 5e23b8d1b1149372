"""Checks that ranks can find the module of `task.module`."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def module_faults(name: str) -> Iterator[str]:
    """Yields one line if `name` is not a dotted name or no such module exists. Imports nothing."""
    if not all(part.isidentifier() for part in name.split(".")):
        yield (
            f"task.module={name}: must be the dotted name of a module that Python can import, such as "
            "task.module=experiments.pretrain; a file is not"
        )
    elif not _exists(name):
        yield (
            f"task.module={name}: there is no such module in {os.getcwd()} or where Python looks; correct the name, or add its folder to "
            "PYTHONPATH"
        )


def _exists(name: str) -> bool:
    """Also looks in the current folder, where ranks start, and for `experiments` inside an installed ztk."""
    first, *others = name.split(".")
    package = Path(__file__).resolve().parents[1]
    places = ([os.getcwd(), *sys.path], [str(package)], [str(package.parent)])
    return any(_holds(PathFinder.find_spec(first, place), names=others) for place in places) or _holds(
        importlib.util.find_spec(first), names=others
    )


def _holds(spec: ModuleSpec | None, *, names: list[str]) -> bool:
    for name in names:
        places = None if spec is None else spec.submodule_search_locations
        spec = None if places is None else PathFinder.find_spec(name, list(places))
    return spec is not None
