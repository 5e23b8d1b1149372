"""`install`: from then on `import deepspeed` in this process is ztk, and libraries that look for it find it; `deepspeed_chat` likewise, where
the script has no package of that name.

Hugging Face asks three things of a package: `importlib.util.find_spec`, `importlib.metadata.version`, and the import itself. One object on
`sys.meta_path` answers all three; an entry in `sys.modules` alone would not.
"""

import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType

from ztk.deepspeed.names.table import MODULES
from ztk.deepspeed.names.tree import module_of
from ztk.deepspeed.version import version
from ztk.hf import watch

SHIM = Path(__file__).resolve().parents[1] / "shim"  # on PYTHONPATH it does the same for every process that inherits it


def install() -> None:
    """Gives the name `deepspeed` to ztk in this process. A second call does nothing.

    Call it before transformers or accelerate are imported: they decide at their import whether DeepSpeed is there.
    Raises RuntimeError if they are already imported without it, or if the real DeepSpeed is already imported.
    """
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    _refuse_another(sys.modules.get("deepspeed"))
    _refuse_too_late()
    watch()
    sys.meta_path.insert(0, Finder())
    sys.modules["deepspeed"] = module_of("deepspeed")


class Finder(DistributionFinder, Loader):
    """Finds the modules of the table, and the distribution that Hugging Face reads the version of."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for a module of another name. Raises ModuleNotFoundError for one of DeepSpeed's that ztk does not have."""
        root = fullname.partition(".")[0]
        if root not in ("deepspeed", "deepspeed_chat") or (root == "deepspeed_chat" and _is_the_scripts(root)):
            return None
        if fullname not in MODULES:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: ztk stands in for {root} here and does not offer this module; docs/deepspeed.md says what it "
                "offers",
                name=fullname,
            )
        return ModuleSpec(fullname, self, is_package=any(other.startswith(f"{fullname}.") for other in MODULES))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module of that name: ztk's own, or one made of a table of names."""
        module = module_of(spec.name)
        self._spec_of = getattr(self, "_spec_of", {})
        self._spec_of[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module is ready; one that is ztk's own keeps the spec it was imported by."""
        assert module.__spec__ is not None
        name = module.__spec__.name
        module.__spec__ = self._spec_of.pop(name) or module.__spec__

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        """The metadata of the package `deepspeed`, for `importlib.metadata`."""
        name = getattr(context, "name", None)
        if name is None or name.lower() == "deepspeed":
            yield Distribution.at(SHIM / f"deepspeed-{version}.dist-info")


def _is_the_scripts(name: str) -> bool:
    """There is a package or module of that name that is not ztk's: a folder beside the script, or an installed one."""
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != SHIM]
    return PathFinder.find_spec(name, elsewhere) is not None


def _refuse_another(module: ModuleType | None) -> None:
    """The module that `shim` is executing right now is no other."""
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    if module is None or (origin and Path(origin).resolve().is_relative_to(SHIM)):
        return
    raise RuntimeError(
        f"deepspeed is already imported, from {origin}: call ztk.deepspeed.install() before the first `import deepspeed`"
    )


def _refuse_too_late() -> None:
    """What these two define at their import depends on whether DeepSpeed is there."""
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
