"""Values of keys that are files, folders or objects in files: checks that they exist, and absolute paths."""

import glob
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ztk.core.policies.records import record_of


def absolute(path: str) -> str:
    """An absolute path, with ~ resolved."""
    return os.path.abspath(os.path.expanduser(path))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@dataclass(frozen=True, kw_only=True, slots=True)
class Paths:
    """A path; with `several` also a list of paths, which a run then has in every case; with `named` a mapping from names to paths.

    kind: "file", "folder", "run" (the folder of a run with checkpoints, or another folder) or "pattern" (a file, a folder, or a pattern that
    matches some) if it must exist. fix: the end of the message if it does not. words: values that are no paths.
    """

    kind: str = ""
    fix: str = ""
    several: bool = False
    named: bool = False
    words: tuple[str, ...] = ()

    def absolute(self, value: Any) -> Any:
        """The value with absolute paths."""
        if self.named:
            return {name: absolute(str(path)) for name, path in value.items()}
        if self.several:
            return [absolute(str(path)) for path in _listed(value)]
        return value if value in self.words else absolute(value)

    def faults(self, value: Any, *, key: str) -> Iterator[str]:
        """One line per path that does not exist."""
        if value == []:
            yield f"{key}=[]: names no file; {self.fix}"
        entries = value.items() if isinstance(value, Mapping) else [("", path) for path in _listed(value)]
        for name, path in entries:
            if str(path) not in self.words and (reason := self._reason(str(path))):
                yield f"{f'{key}.{name}' if name else key}={path}: {reason}"

    def _reason(self, path: str) -> str:
        place, here = os.path.expanduser(path), f"(from {os.getcwd()})"
        if self.kind == "file" and not os.path.isfile(place):
            return f"is no file; {self.fix}"
        if self.kind == "folder" and not os.path.isdir(place):
            return f"is no folder; {self.fix}"
        if self.kind == "run" and not os.path.isdir(place):
            return f"no such folder {here}; {self.fix}"
        if self.kind == "run" and record_of(place) is not None and not _has_checkpoint(place):
            return (
                "this run has no checkpoint: it was started with checkpoint=none, or ended before its first step; start it again, or "
                "name another run"
            )
        if self.kind == "pattern" and not (path and (os.path.exists(place) or _matches(place))):
            return f"no such file or folder, and no file matches {here}: {self.fix}"
        return ""


def _has_checkpoint(run: str) -> bool:
    return any(Path(run, "checkpoints").glob("step-*[0-9]"))


def _matches(pattern: str) -> bool:
    return next(glob.iglob(pattern, recursive=True), None) is not None


def is_object_name(name: str) -> bool:
    """Whether `name` is `FILE.py:NAME` or `MODULE:NAME`."""
    source, _, last = name.rpartition(":")
    is_module = bool(source) and all(part.isidentifier() for part in source.split("."))
    return last.isidentifier() and (source.endswith(".py") or is_module)


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectNames:
    """`FILE.py:NAME` or `MODULE:NAME`; with `several` also a list of names, or of mappings with a `function` and its `weight`; with `dotted`
    also `MODULE.NAME`.

    kind: FUNCTION or CLASS, for the message. example: a name, for the message.
    """

    kind: str
    example: str
    several: bool = False
    dotted: bool = False

    def absolute(self, value: Any) -> Any:
        """The value with absolute paths of files."""
        if not self.several:
            return self._absolute_name(value)
        return [
            entry | {"function": self._absolute_name(entry["function"])}
            if isinstance(entry, dict)
            else self._absolute_name(entry)
            for entry in _listed(value)
        ]

    def faults(self, value: Any, *, key: str) -> Iterator[str]:
        """One line per entry of another form, without a finite weight, or in a file that does not exist."""
        for entry in _listed(value):
            if isinstance(entry, str):
                yield from self._name_faults(entry, key=key)
            elif (
                not isinstance(entry, Mapping)
                or not isinstance(entry.get("function"), str)
                or set(entry) - {"function", "weight"}
            ):
                yield (
                    f"{key}: {entry!r} must be FILE.py:{self.kind} or {{function: FILE.py:{self.kind}, weight: 0.2}}; use "
                    f"{key}=[a.py:f,{{function: b.py:g, weight: 0.2}}]"
                )
            else:
                yield from self._name_faults(entry["function"], key=key)
                weight = entry.get("weight", 1.0)
                if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
                    yield f"{key}: weight: {weight!r} of {entry['function']} must be a finite number; use weight: 0.2"

    def _name_faults(self, name: str, *, key: str) -> Iterator[str]:
        name = self._with_colon(name)
        source = name.rpartition(":")[0]
        if not is_object_name(name):
            yield f"{key}={name}: must be FILE.py:{self.kind} or MODULE:{self.kind}; use {key}={self.example}"
        elif source.endswith(".py") and not os.path.isfile(os.path.expanduser(source)):
            yield f"{key}={name}: there is no file {source} (from {os.getcwd()}); give its path"

    def _absolute_name(self, name: str) -> str:
        source, _, last = self._with_colon(name).rpartition(":")
        return f"{absolute(source) if source.endswith('.py') else source}:{last}"

    def _with_colon(self, name: str) -> str:
        module, _, last = name.rpartition(".")
        return f"{module}:{last}" if self.dotted and module and ":" not in name and "/" not in name else name
