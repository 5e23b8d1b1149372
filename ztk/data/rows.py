"""Rows of files as Python objects: lines of jsonl, entries of a json list, rows of parquet and of arrow files.

Files may be compressed.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

from ztk.core.policies.text import COLUMNS, LINES
from ztk.data.lines import parse_line
from ztk.data.opening import kind_of, opened, opened_table

_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"  # files of datasets' save_to_disk
# A folder is read as the first of these kinds that it contains. A json file next to other kinds is rarely data.
_KINDS = (LINES, (".parquet",), (".arrow",), (".json",))


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """place: the line, entry or row in its file. value: its Python object, or a ValueError if it cannot be read."""

    place: str
    value: Any


def files_of(paths: Sequence[str]) -> list[Path]:
    """Returns the files that `paths` name: files, globs, and folders of one kind of file or of `save_to_disk`.

    Raises:
        ValueError: an entry names no file, or a saved data set with several splits.
    """
    files: list[Path] = []
    for entry in paths:
        path = Path(entry).expanduser()
        found = _of_folder(path) if path.is_dir() else [path] if path.is_file() else []
        found = found or [Path(name) for name in sorted(glob(str(path), recursive=True)) if Path(name).is_file()]
        if not found:
            fault = "no *.jsonl, json, parquet or arrow is in it" if path.is_dir() else "no such file or folder"
            raise ValueError(f"data.path={entry}: {fault}: name another")
        files += found
    return files


def read_rows(path: Path) -> Iterator[Row]:
    """Yields the rows of one file in order. Files with unknown extensions are read as jsonl.

    Raises:
        ValueError: the file cannot be read, or needs pyarrow, which is not installed.
    """
    kind = kind_of(path)
    try:
        yield from _of_json(path) if kind == ".json" else _of_table(path) if kind in COLUMNS else _of_lines(path)
    except (OSError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"data.path={path}: cannot be read ({error}); name others") from None


def _of_folder(folder: Path) -> list[Path]:
    if (folder / _SAVED_SPLITS).is_file():
        splits = json.loads((folder / _SAVED_SPLITS).read_text(encoding="utf-8")).get("splits", [])
        raise ValueError(
            f"data.path={folder}: has the splits {', '.join(splits)}; name one, such as data.path={folder / (splits or ['train'])[0]}"
        )
    if (folder / _SAVED).is_file():
        named = json.loads((folder / _SAVED).read_text(encoding="utf-8"))["_data_files"]
        return [folder / entry["filename"] for entry in named]
    files = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    for kinds in _KINDS:
        if found := [file for file in files if kind_of(file) in kinds]:
            return found
    return []


def _of_lines(path: Path) -> Iterator[Row]:
    with opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield Row(place=f"line {number}", value=_parsed(line))


def _of_json(path: Path) -> Iterator[Row]:
    """Reads a list of objects, an object with one list, or jsonl with the wrong extension."""
    with opened(path) as source:
        text = source.read()
    value = _parsed(text)
    if isinstance(value, ValueError) and b"\n" in text.strip():
        yield from _of_lines(path)
        return
    if isinstance(value, dict):
        lists = [entry for entry in value.values() if isinstance(entry, list)]
        value = lists[0] if len(lists) == 1 and len(value) == 1 else [value]
    if isinstance(value, list):
        yield from (Row(place=f"record {number}", value=entry) for number, entry in enumerate(value, start=1))
    elif text.strip():
        yield Row(place="record 1", value=value)


def _parsed(text: bytes) -> Any:
    try:
        return parse_line(text)
    except ValueError as error:
        return error


def _of_table(path: Path) -> Iterator[Row]:
    with opened_table(path) as table:
        values = (value for batch in table.batches() for value in batch.to_pylist())
        for number, value in enumerate(values, start=1):
            yield Row(place=f"row {number}", value=_without_nulls(value))


def _without_nulls(value: Any) -> Any:
    """Removes null fields: a column has a value for every row, also for rows that lack the field."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
