"""Packs files into one: training bytes, then held-out bytes, then a digest of all bytes in their original order.

The packed file is named after the files' listing (path, size, modification time), so a changed text gets a new file. The ranks of a
machine share it: the first one packs, and the others wait and then map the same pages.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from ztk.data.cache import built_once, cache_folder
from ztk.data.sources import SourceFile

DIGEST_BYTES = 16
_PERIOD = 1 << 20  # the end of each mebibyte is held out
_FORMAT = 1  # part of the name: increase it when the layout changes


def num_held_out(total: int, *, share: float) -> int:
    """Returns how many of `total` bytes are held out."""
    periods, rest = divmod(total, _PERIOD)
    return periods * int(_PERIOD * share) + int(rest * share)


def packed_file(files: list[SourceFile], *, cache_dir: str | None, share: float) -> Path:
    """Returns the packed form of `files`, and writes it if no process has done so yet.

    Raises ValueError if the folder cannot be written.
    """
    listing = "\n".join(f"{file.path.absolute()}\t{file.size}\t{file.modified}" for file in files)
    key = hashlib.blake2b(f"{_FORMAT} {_PERIOD} {share}\n{listing}".encode(), digest_size=12).hexdigest()
    packed = cache_folder(cache_dir) / f"corpus-{key}.bin"
    return built_once(packed, build=lambda unfinished: _pack(files, target=unfinished, share=share))


def _pack(files: list[SourceFile], *, target: Path, share: float) -> None:
    try:
        _write(files, target=target, share=share)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _write(files: list[SourceFile], *, target: Path, share: float) -> None:
    total = sum(file.size for file in files)
    train_at, validation_at = 0, total - num_held_out(total, share=share)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    with open(target, "wb") as out:
        for period in _periods(files):
            digest.update(period)
            cut = len(period) - int(len(period) * share)
            out.seek(train_at)
            train_at += out.write(period[:cut])
            out.seek(validation_at)
            validation_at += out.write(period[cut:])
        out.seek(total)
        out.write(digest.digest())
        out.flush()
        os.fsync(out.fileno())


def _periods(files: list[SourceFile]) -> Iterator[bytes]:
    """Yields the bytes of all files in order, in pieces of one period. The last piece may be shorter."""
    pending = bytearray()
    for file in files:
        left = file.size
        with file.opened() as source:
            while left:
                piece = source.read(min(left, _PERIOD))
                if not piece:
                    raise ValueError(
                        f"data.path={file.path}: the file shrank while it was read; start again when nothing writes to it"
                    )
                left -= len(piece)
                pending += piece
                if len(pending) >= _PERIOD:
                    yield bytes(pending[:_PERIOD])
                    del pending[:_PERIOD]
    if pending:
        yield bytes(pending)
