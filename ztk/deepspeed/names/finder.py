"""`install` makes `import deepspeed` in this process resolve to ztk, also for libraries that check for it; likewise `deepspeed_chat`,
unless the script has a package of that name.

Hugging Face uses three ways to check for a package: `importlib.util.find_spec`, `importlib.metadata.version`, and the import itself. An
object on `sys.meta_path` supports all three; an entry in `sys.modules` would not.
"""

import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType

from ztk.deepspeed.names.table import GONE, MODULES
from ztk.deepspeed.names.tree import module_of
from ztk.deepspeed.version import version
from ztk.hf import watch

SHIM = (
    Path(__file__).resolve().parents[1] / "shim"
)  # on PYTHONPATH, it has the same effect in every process that inherits it


def install() -> None:
    """Makes the name `deepspeed` refer to ztk in this process. Idempotent.

    Call it before importing transformers or accelerate, which check for DeepSpeed at import. Raises RuntimeError if they were imported
    without it, or if the real DeepSpeed is already imported.
    """
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    _refuse_another(sys.modules.get("deepspeed"))
    _refuse_too_late()
    watch()
    sys.meta_path.insert(0, Finder())
    sys.modules["deepspeed"] = module_of("deepspeed")


class Finder(DistributionFinder, Loader):
    """Finds the modules of the table, and the distribution whose version Hugging Face reads."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns None for unrelated modules. Raises ModuleNotFoundError for a DeepSpeed module that ztk does not have."""
        root = fullname.partition(".")[0]
        if root not in ("deepspeed", "deepspeed_chat") or (root == "deepspeed_chat" and _is_the_scripts(root)):
            return None
        if fullname not in MODULES:
            way = GONE.get(fullname, "docs/deepspeed.md lists the supported ones")
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: ztk stands in for {root} here and does not offer this module; {way}",
                name=fullname,
            )
        return ModuleSpec(fullname, self, is_package=any(other.startswith(f"{fullname}.") for other in MODULES))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the module of that name: ztk's own, or one made from a table of names."""
        module = module_of(spec.name)
        self._spec_of = getattr(self, "_spec_of", {})
        self._spec_of[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restores the spec of ztk's own modules. There is nothing to execute."""
        assert module.__spec__ is not None
        name = module.__spec__.name
        module.__spec__ = self._spec_of.pop(name) or module.__spec__

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        """Yields the metadata of the package `deepspeed`, for `importlib.metadata`."""
        name = getattr(context, "name", None)
        if name is None or name.lower() == "deepspeed":
            yield Distribution.at(SHIM / f"deepspeed-{version}.dist-info")


def _is_the_scripts(name: str) -> bool:
    """Returns whether a package or module of that name exists outside ztk: a folder next to the script, or an installed one."""
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != SHIM]
    return PathFinder.find_spec(name, elsewhere) is not None


def _refuse_another(module: ModuleType | None) -> None:
    """Raises for another `deepspeed`. The module that `shim` is executing does not count."""
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    if module is None or (origin and Path(origin).resolve().is_relative_to(SHIM)):
        return
    raise RuntimeError(
        f"deepspeed is already imported, from {origin}: call ztk.deepspeed.install() before the first `import deepspeed`"
    )


def _refuse_too_late() -> None:
    """Raises if one of these libraries was imported too early: their contents depend on DeepSpeed's presence."""
    transformers = sys.modules.get("transformers.integrations.deepspeed")
    accelerate = sys.modules.get("accelerate.accelerator")
    late = [
        name
        for name, without in (
            ("transformers", transformers is not None and transformers.DeepSpeedConfig is object),
            ("accelerate", accelerate is not None and not hasattr(accelerate, "DeepSpeedEngineWrapper")),
        )
        if without
    ]
    if late:
        raise RuntimeError(
            f"{' and '.join(late)} was imported before and found no deepspeed: call ztk.deepspeed.install() before the first "
            f"`import {late[0]}`, or start the script by `python -m ztk.deepspeed`"
        )
