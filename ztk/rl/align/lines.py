"""Records of files: every row is read before anything trains on it, and all faults are named together."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ztk.data.rows import files_of, read_rows
from ztk.rl.align.templates import ChatTemplateError

_MAX_FAULTS = 10
R = TypeVar("R")


def read_records(
    paths: Sequence[str], *, make: Callable[[Mapping[str, Any]], R], fields: Mapping[str, str] | None = None
) -> list[R]:
    """The records of all files. paths: as `ztk.data.rows.files_of` takes them. make: from a row's object; raises ValueError for a bad one.
    fields: ztk's names -> the data's.

    Raises:
        ValueError: rows that are no such record, each with file and place, at most ten; files without a record.
        ChatTemplateError: what `make` raises of it: one fault, not one per row.
    """
    found: list[R] = []
    faults: list[str] = []
    for file in files_of(paths):
        for row in read_rows(file):
            try:
                found.append(make(_renamed(_object(row.value), fields=fields or {})))
            except ChatTemplateError:
                raise
            except ValueError as error:
                faults.append(f"data.path={file}, {row.place}: {error}")
            if len(faults) == _MAX_FAULTS:
                raise ValueError("\n".join([*faults, "later lines were not read"]))
    if faults:
        raise ValueError("\n".join(faults))
    if not found:
        raise ValueError(f"data.path={', '.join(paths)}: there are no records; every line must be a JSON object")
    return found


def _renamed(record: Mapping[str, Any], *, fields: Mapping[str, str]) -> Mapping[str, Any]:
    """The record with further names of its fields; it keeps its own, too, which reward functions may ask for."""
    for name, own in fields.items():
        if own not in record:
            raise ValueError(
                f"has no field {own!r} of data.fields={{{name}: {own}}}; its fields are {', '.join(record) or 'none'}"
            )
    return record if not fields else {**record, **{name: record[own] for name, own in fields.items()}}


def _object(value: Any) -> Mapping[str, Any]:
    if isinstance(value, ValueError):
        raise value
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object, such as {...}")
    return value
