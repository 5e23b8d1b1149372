"""Documents of files: a whole text file, a line of jsonl, or a row of parquet or arrow.

Files may be compressed. Bad input yields a `Fault` in its place among the documents; the caller decides whether it ends the run.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ztk.core.policies.text import COLUMNS, LINES
from ztk.data.lines import parse_line
from ztk.data.opening import BrokenFile, kind_of, opened, opened_table, pyarrow_for

PIECE_BYTES = 1 << 22  # a longer text file is read in pieces, cut after a line
_SKIP = "or use data.on_error=skip"


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A document, or a piece of one. is_first: whether it is the document's first piece."""

    text: str
    is_first: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A description of bad input, with file, place and fix. It names keys of the group `data`."""

    text: str

    def with_words(self, words: Mapping[str, str]) -> str:
        """Returns the text with other keys. words: a part of the text -> its replacement."""
        found = self.text
        for theirs, own in words.items():
            found = found.replace(theirs, own)
        return found


def read_documents(path: Path, *, field: str) -> Iterator[Document | Fault]:
    """Yields the documents of one file in order, except those without a letter. field: the text field of jsonl and parquet.

    Raises:
        ValueError: the format is not supported, or needs pyarrow, which is not installed.
    """
    kind = kind_of(path)
    if kind in COLUMNS:
        found = _of_table(path, field=field)
    else:
        found = _of_lines(path, field=field) if kind in LINES else _of_text(path)
    count = 0
    try:
        for item in found:
            if isinstance(item, Fault) or item.text:
                count += 1
                yield item
    except BrokenFile as error:
        yield Fault(text=f"{error}, {_SKIP}")
        return
    except (EOFError, OSError, zlib.error) as error:
        yield Fault(text=f"data.path={path}: cannot be read to its end ({error}); make the file again, {_SKIP}")
        return
    if not count:
        yield Fault(text=f"data.path={path}: the file is empty; leave it out, {_SKIP}")


def _of_text(path: Path) -> Iterator[Document | Fault]:
    lines, pending, is_first = 1, b"", True
    with opened(path) as source:
        read = source.read(PIECE_BYTES)
        while read:
            following = source.read(PIECE_BYTES)
            piece = pending + read
            cut = _cut(piece) if following else len(piece)
            piece, pending = piece[:cut], piece[cut:]
            item = _decoded(piece, path=path, first_line=lines, is_first=is_first)
            yield item
            if isinstance(item, Fault):
                return
            read, is_first, lines = following, False, lines + piece.count(b"\n")


def _decoded(piece: bytes, *, path: Path, first_line: int, is_first: bool) -> Document | Fault:
    try:
        return Document(text=piece.decode("utf-8"), is_first=is_first)
    except UnicodeDecodeError as error:
        return Fault(text=_not_utf8(path, line=first_line + piece[: error.start].count(b"\n"), error=error))


def _cut(piece: bytes) -> int:
    """Returns where to end a piece: after its last line end, else before a character that may be incomplete."""
    at = piece.rfind(b"\n") + 1
    if at:
        return at
    at = len(piece)
    while at > len(piece) - 4 and at > 0 and piece[at - 1] & 0xC0 == 0x80:
        at -= 1
    return max(1, at - 1)  # keeps the character's first byte for the next piece


def _of_lines(path: Path, *, field: str) -> Iterator[Document | Fault]:
    with opened(path) as source:
        for number, line in enumerate(source, start=1):
            if not line.strip():
                continue
            place = f"data.path={path}, line {number}"
            try:
                record = parse_line(line)
            except ValueError as error:
                yield Fault(text=f"{place}: {error}; fix the line, {_SKIP}")
                continue
            if not isinstance(record, dict):
                yield Fault(text=f'{place}: must be a JSON object, such as {{"{field}": "..."}}; fix the line, {_SKIP}')
            elif field not in record:
                others = ", ".join(sorted(record)) or "none"
                yield Fault(
                    text=f"{place}: has no field {field!r} (its fields: {others}); use data.field=NAME, {_SKIP}"
                )
            elif not isinstance(record[field], str):
                kind = type(record[field]).__name__
                yield Fault(text=f"{place}: field {field!r} is no text but {kind}; use data.field=NAME, {_SKIP}")
            else:
                yield Document(text=record[field])


def _of_table(path: Path, *, field: str) -> Iterator[Document | Fault]:
    types = pyarrow_for(path).types
    with opened_table(path) as table:
        if field not in table.schema.names:
            named = ", ".join(table.schema.names) or "none"
            yield Fault(
                text=f"data.path={path}: has no column {field!r} (its columns: {named}); use data.field=NAME, {_SKIP}"
            )
            return
        kind = table.schema.field(field).type
        if not (types.is_string(kind) or types.is_large_string(kind)):
            yield Fault(text=f"data.path={path}: column {field!r} is no text but {kind}; use data.field=NAME, {_SKIP}")
            return
        values = (value for batch in table.batches([field]) for value in batch.column(0))
        for row, value in enumerate(values, start=1):
            place = f"data.path={path}, row {row}"
            try:
                text = value.as_py()
            except UnicodeDecodeError as error:
                yield Fault(text=f"{place}: is not UTF-8 ({error.reason}); convert it, {_SKIP}")
                continue
            if text is None:
                yield Fault(text=f"{place}: column {field!r} is null; leave the row out, {_SKIP}")
            else:
                yield from _checked(text, place=place)


def _checked(text: str, *, place: str) -> Iterator[Document | Fault]:
    """Checks for half of a surrogate pair, which is not valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        yield Fault(text=f"{place}: is not UTF-8 ({error.reason}); fix the line, {_SKIP}")
        return
    yield Document(text=text)


def _not_utf8(path: Path, *, line: int, error: UnicodeDecodeError) -> str:
    byte = error.object[error.start]
    return f"data.path={path}, line {line}: is not UTF-8 (byte 0x{byte:02x}: {error.reason}); convert the file, as by iconv -t UTF-8, {_SKIP}"
