"""Records of files of JSON lines: every line is read before anything trains on it, and all faults are named together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any, TypeVar

from ztk.data.lines import parse_line
from ztk.rl.align.templates import ChatTemplateError

_MAX_FAULTS = 10
R = TypeVar("R")


def read_records(paths: Sequence[str], *, make: Callable[[Mapping[str, Any]], R]) -> list[R]:
    """The records of all files. paths: files, globs, or folders of *.jsonl. make: from a line's object; raises ValueError for a bad one.

    Raises:
        ValueError: lines that are no such record, each with file and line, at most ten; files without a record.
        ChatTemplateError: what `make` raises of it: one fault, not one per line.
    """
    found: list[R] = []
    faults: list[str] = []
    for file in files_of(paths):
        for number, line in _lines(file):
            try:
                found.append(make(_object(line)))
            except ChatTemplateError:
                raise
            except ValueError as error:
                faults.append(f"data.path={file}, line {number}: {error}")
            if len(faults) == _MAX_FAULTS:
                raise ValueError("\n".join([*faults, "later lines were not read"]))
    if faults:
        raise ValueError("\n".join(faults))
    if not found:
        raise ValueError(f"data.path={', '.join(paths)}: there are no records; every line must be a JSON object")
    return found


def files_of(paths: Sequence[str]) -> list[Path]:
    """The files that `paths` name. Raises ValueError if an entry names none."""
    files: list[Path] = []
    for entry in paths:
        path = Path(entry).expanduser()
        found = sorted(path.glob("*.jsonl")) if path.is_dir() else [path] if path.is_file() else []
        found = found or [Path(name) for name in sorted(glob(str(path), recursive=True)) if Path(name).is_file()]
        if not found:
            raise ValueError(f"data.path={entry}: no such file, and no *.jsonl in it: name others")
        files += found
    return files


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers."""
    try:
        with file.open("rb") as lines:
            yield from ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    except OSError as error:
        raise ValueError(f"data.path={file}: cannot be read ({error}); name others") from None


def _object(line: bytes) -> Mapping[str, Any]:
    record = parse_line(line)
    if not isinstance(record, dict):
        raise ValueError("must be a JSON object, such as {...}")
    return record
