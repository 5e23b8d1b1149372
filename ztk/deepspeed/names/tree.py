"""Modules of the names `deepspeed` and `deepspeed_chat`, created from the table on first use."""

import functools
import importlib
from collections.abc import Mapping
from types import ModuleType

from ztk.deepspeed.names.table import GONE, MODULES, PACKAGES


class Facade(ModuleType):
    """A module of DeepSpeed whose contents are elsewhere in ztk. Names are imported on first use and can be replaced."""

    def __init__(self, name: str, *, homes: Mapping[str, str]) -> None:
        super().__init__(name, f"DeepSpeed's module {name}, provided by ztk.")
        self.__path__ = []  # a package whose submodules only ztk's finder finds
        self._homes = homes

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and not any(name in names.split() for names in self._homes.values()):
            raise AttributeError(name)  # attributes that Python itself looks up
        value = _named(name, homes=self._homes, module=self.__name__)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *names_of(self.__name__)})


@functools.cache
def module_of(name: str) -> ModuleType:
    """Returns the module for `deepspeed...`. Raises KeyError if it is not in the table."""
    row = MODULES[name]
    return importlib.import_module(row) if isinstance(row, str) else Facade(name, homes=row)


def lookup(name: str, module: str = "deepspeed") -> object:
    """Returns a name in `deepspeed`, or in another package that is ztk's own: a function, a class, or a submodule.

    Raises AttributeError.
    """
    return _named(name, homes=PACKAGES[module], module=module)


def names_of(module: str) -> list[str]:
    """Returns the names in `module` according to the table: its own, and its direct submodules."""
    row = PACKAGES.get(module, MODULES[module])
    listed = [] if isinstance(row, str) else [n for home, names in row.items() for n in _expand(names, home=home)]
    below = [other.rpartition(".") for other in MODULES]
    return sorted({*listed, *(child for parent, _, child in below if parent == module)})


def _named(name: str, *, homes: Mapping[str, str], module: str) -> object:
    for home, names in homes.items():
        if name in _expand(names, home=home):
            return getattr(importlib.import_module(home), name)
    if f"{module}.{name}" in MODULES:
        return module_of(f"{module}.{name}")
    way = GONE.get(f"{module}.{name}", "docs/deepspeed.md lists the supported names")
    raise AttributeError(f"{module}.{name}: not offered by ztk; {way}")


def _expand(names: str, *, home: str) -> list[str]:
    if names != "*":
        return names.split()
    module = importlib.import_module(home)
    return list(getattr(module, "__all__", None) or _defined_in(module))


def _defined_in(module: ModuleType) -> list[str]:
    own = {name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
    return sorted(name for name in own if not name.startswith("_"))
