"""Wrong kernels on purpose: a copy of ztk.kernels with one piece of source replaced, under another name and op namespace.

The tests of wrong kernels and `scripts/plant_mistakes.py` run the generic checks on such copies.
"""

import importlib
import importlib.util
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import ztk.kernels
from ztk.kernels import _library

SOURCE = Path(ztk.kernels.__file__).parent
_numbers = itertools.count()


@contextmanager
def planted(
    folder: Path, *, file: str, old: str, new: str, nth: int = 0, backend: str = "triton"
) -> Iterator[ModuleType]:
    """The package with the nth `old` in `file` replaced by `new`, `backend` chosen. Raises AssertionError where the
    source does not say `old`."""
    name = f"planted_{next(_numbers)}"
    package = folder / name
    package.mkdir()
    for path in SOURCE.glob("*.py"):
        text = path.read_text()
        if path.name == file:
            parts = text.split(old)
            assert len(parts) > nth + 1, f"{file} does not say {old!r} {nth + 1} times"
            text = old.join(parts[: nth + 1]) + new + old.join(parts[nth + 1 :])
        text = text.replace("ztk.kernels", name).replace('NAMESPACE = "ztk"', f'NAMESPACE = "{name}"')
        (package / path.name).write_text(text.replace("torch.ops.ztk.", f"torch.ops.{name}."))
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(name)
        module.set_backend(backend)
        yield module
    finally:
        sys.path.remove(str(folder))
        for loaded in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
            del sys.modules[loaded]


def spec_of(package: ModuleType, op: str) -> Any:
    """The package's OpSpec of that name."""
    return next(spec for spec in package.ALL_OPS if spec.name == op)


def load_copy(function, *, old: str, new: str, tmp_path, monkeypatch):
    """The op's module with one piece of source replaced, registering its ops under another namespace."""
    original = sys.modules[function.__module__]
    source = open(original.__file__).read()
    assert old in source, f"the source no longer says {old!r}"
    path = tmp_path / "planted.py"
    namespace = f"planted_copy_{next(_numbers)}"  # FLOPs are registered once per namespace
    path.write_text(source.replace(old, new).replace("torch.ops.ztk.", f"torch.ops.{namespace}."))
    monkeypatch.setattr(_library, "LIBRARY", torch.library.Library(namespace, "DEF"))
    monkeypatch.setattr(_library, "NAMESPACE", namespace)
    monkeypatch.setattr(_library, "LAUNCHERS", {})  # or the ops' own would launch the copy's kernels from here on
    spec = importlib.util.spec_from_file_location("planted", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
