"""Wrong kernels on purpose: a copy of ztk.kernels with one piece of source replaced, under another name and op namespace.

The tests of wrong kernels and `tests/kernels/plant_mistakes.py` run the generic checks on such copies.
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
from ztk.kernels.launch import library

SOURCE = Path(ztk.kernels.__file__).parent
AOT = Path(__file__).parent / "aot"
_numbers = itertools.count()


@contextmanager
def planted(
    folder: Path, *, file: str, old: str, new: str, nth: int = 0, backend: str = "triton"
) -> Iterator[ModuleType]:
    """The package with the nth `old` in `file`, a path such as ops/rope.py, replaced by `new`, `backend` chosen, and with the ahead-of-time
    tooling as its `aot`. Raises AssertionError if the source does not contain `old`."""
    name = f"planted_{next(_numbers)}"
    package = folder / name
    package.mkdir()
    for path in (*SOURCE.rglob("*.py"), *AOT.rglob("*.py")):
        place = path.relative_to(SOURCE) if path.is_relative_to(SOURCE) else Path("aot") / path.relative_to(AOT)
        text = path.read_text()
        if str(place) == file:
            parts = text.split(old)
            assert len(parts) > nth + 1, f"{file} does not say {old!r} {nth + 1} times"
            text = old.join(parts[: nth + 1]) + new + old.join(parts[nth + 1 :])
        text = text.replace("tests.kernels.aot", f"{name}.aot").replace("ztk.kernels", name)
        text = text.replace('NAMESPACE = "ztk"', f'NAMESPACE = "{name}"')
        text = text.replace("torch.ops.ztk.", f"torch.ops.{name}.")
        (package / place).parent.mkdir(parents=True, exist_ok=True)
        (package / place).write_text(text)
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
    assert old in source, f"the source no longer contains {old!r}"
    path = tmp_path / "planted.py"
    namespace = f"planted_copy_{next(_numbers)}"  # FLOPs are registered once per namespace
    path.write_text(source.replace(old, new).replace("torch.ops.ztk.", f"torch.ops.{namespace}."))
    monkeypatch.setattr(library, "LIBRARY", torch.library.Library(namespace, "DEF"))
    monkeypatch.setattr(library, "NAMESPACE", namespace)
    monkeypatch.setattr(library, "LAUNCHERS", {})  # or the ops' own would launch the copy's kernels from here on
    spec = importlib.util.spec_from_file_location("planted", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
