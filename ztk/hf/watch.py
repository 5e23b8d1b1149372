"""Hugging Face's modules, completed right after a script has imported them.

What is changed in them is listed here and nowhere else. Nothing of theirs is imported by this package.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

COMPLETED = {  # their module -> ztk's, whose `complete(module)` changes it
    "accelerate.state": "ztk.hf.ranks",
    "transformers.modeling_utils": "ztk.hf.loading",
    "transformers.training_args": "ztk.hf.precision",
    "trl.models.utils": "ztk.hf.generation",
    "trl.trainer.utils": "ztk.hf.head",
}


def watch() -> None:
    """From now on the modules above are completed when they are imported; those that are imported already at once. A second call does
    nothing."""
    if any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Watcher())
    for name in COMPLETED:
        if name in sys.modules:
            _complete(sys.modules[name])


def _complete(module: ModuleType) -> None:
    importlib.import_module(COMPLETED[module.__name__]).complete(module)


class _Watcher(MetaPathFinder):
    """Lets the other finders find, and puts itself behind the loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in COMPLETED:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Completing(spec.loader)
                return spec
        return None


class _Completing(Loader):
    """Another loader, and `complete` after it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = module.__spec__.loader = self._loader  # tracebacks and inspect ask it for the source
        self._loader.exec_module(module)
        _complete(module)
