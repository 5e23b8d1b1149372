"""Reads records from files. All rows are read before training, and faults are reported together."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ztk.data.rows import files_of, read_rows
from ztk.rl.align.templates import ChatTemplateError

_MAX_FAULTS = 10
R = TypeVar("R")


def read_records(
    paths: Sequence[str], *, make: Callable[[Mapping[str, Any]], R], fields: Mapping[str, str] | None = None
) -> list[R]:
    """Returns the records of all files.

    paths: as for `ztk.data.rows.files_of`. make: converts a row's object, and raises ValueError for an invalid one. fields: ztk's names
    -> the data's.

    Raises:
        ValueError: invalid rows, each with file and place, at most ten; or files without a record.
        ChatTemplateError: raised by `make`; reported once instead of per row.
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
    """Adds further names for fields of the record. Its own names are kept, because reward functions may use them."""
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
