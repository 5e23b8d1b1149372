"""Opens files of lines and of columns, compressed or not (`.gz`, `.zst`).

pyarrow, for parquet, arrow and zst, comes with the extra `data` and is imported on use.
"""

import contextlib
import gzip
import importlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ztk.core.policies.text import COMPRESSED

_ROWS = 1024  # rows of parquet in memory at a time
_ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"  # end of a stream: https://arrow.apache.org/docs/format/Columnar.html#ipc-streaming-format


class BrokenFile(ValueError):
    """A parquet or arrow file that cannot be read. The message has file and fix."""


def kind_of(path: Path) -> str:
    """Returns the extension of a file, inside of its compression."""
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSED else path).suffix.lower()


def opened(path: Path) -> BinaryIO:
    """Opens the file, decompressed according to its extension."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.open(path, "rb")  # pyrefly: ignore[bad-return]
    if suffix == ".zst":
        source: Any = pyarrow_for(path).input_stream(str(path), compression="zstd")
        return io.BufferedReader(source)
    return open(path, "rb")


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """An open parquet or arrow file. schema: pyarrow's. reader: reads its record batches."""

    path: Path
    schema: Any
    reader: Any

    def batches(self, columns: list[str] | None = None) -> Iterator[Any]:
        """Yields the record batches, with all columns or the named ones. Raises OSError if an arrow file breaks off."""
        if kind_of(self.path) == ".parquet":
            yield from self.reader.iter_batches(batch_size=_ROWS, columns=columns)
            return
        for batch in self.reader:
            yield batch.select(columns) if columns else batch
        if self.path.suffix.lower() not in COMPRESSED:
            with open(self.path, "rb") as source:
                source.seek(-len(_ARROW_END), io.SEEK_END)
                if source.read() != _ARROW_END:  # pyarrow treats a truncated file as a shorter one
                    raise OSError("it breaks off")


@contextlib.contextmanager
def opened_table(path: Path) -> Iterator[Table]:
    """Opens a parquet file, or a file of `datasets.save_to_disk`, a stream of record batches.

    Raises:
        BrokenFile: it cannot be read, now or in the block.
        ValueError: pyarrow is not installed.
    """
    arrow = pyarrow_for(path)
    is_parquet, is_packed = kind_of(path) == ".parquet", path.suffix.lower() in COMPRESSED
    try:
        with opened(path) if is_packed else arrow.memory_map(str(path)) as source:
            if is_parquet:  # read from its end
                parquet = importlib.import_module("pyarrow.parquet")
                with parquet.ParquetFile(arrow.BufferReader(source.read()) if is_packed else source) as file:
                    yield Table(path=path, schema=file.schema_arrow, reader=file)
            else:
                with arrow.ipc.open_stream(source) as reader:
                    yield Table(path=path, schema=reader.schema, reader=reader)
    except (arrow.ArrowException, OSError) as error:
        kind = "as parquet" if is_parquet else "as a stream of arrow batches"
        fix = "make the file again" if is_parquet else "save the data set again by save_to_disk"
        raise BrokenFile(f"data.path={path}: cannot be read {kind} ({error}); {fix}") from None


def pyarrow_for(path: Path) -> Any:
    """Imports pyarrow to read `path`. Raises ValueError if it is not installed."""
    try:
        return importlib.import_module("pyarrow")
    except ImportError:
        raise ValueError(
            f'data.path={path}: needs the library pyarrow: pip install "ztk[data]", or write the file as jsonl or jsonl.gz'
        ) from None
