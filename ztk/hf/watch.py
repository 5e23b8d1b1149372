"""Adjusts Hugging Face's modules right after a script has imported them.

`COMPLETED` lists all adjusted modules. This package imports none of them itself.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

COMPLETED = {  # module -> functions of this package that adjust it
    "accelerate.state": ("adjustments.use_gloo",),
    "peft.utils.other": ("adjustments.copy_gathered",),
    "transformers.modeling_utils": ("loading.read_slices", "adjustments.keep_size"),
    "transformers.training_args": ("adjustments.allow_bf16",),
    "trl.models.utils": ("adjustments.keep_hooks",),
    "trl.trainer.utils": ("adjustments.gather_head",),
}


def watch() -> None:
    """Adjusts the modules of `COMPLETED`: imported ones immediately, others when they are imported. Idempotent."""
    if any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Watcher())
    for name in COMPLETED:
        if name in sys.modules:
            _complete(sys.modules[name])


def _complete(module: ModuleType) -> None:
    for path in COMPLETED[module.__name__]:
        own, _, function = path.partition(".")
        getattr(importlib.import_module(f"ztk.hf.{own}"), function)(module)


class _Watcher(MetaPathFinder):
    """Finds the modules of `COMPLETED` with the other finders and wraps their loaders."""

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
    """Runs another loader, then `_complete`."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = (
            self._loader
        )  # tracebacks and inspect request the source from the loader
        self._loader.exec_module(module)
        _complete(module)
