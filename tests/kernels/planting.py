"""Wrong kernels on purpose: a copy of ztk.kernels with one piece of source replaced, under another name and op namespace.

The tests of wrong kernels and `scripts/plant_mistakes.py` run the generic checks on such copies.
"""

import importlib
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import ztk.kernels

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
