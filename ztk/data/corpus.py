"""A text as one memory-mapped byte array, with a part held out for validation."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ztk.data.cache import built_once, cache_folder
from ztk.data.mapping import mapped
from ztk.data.sources import SourceFile, named_files, standard_library

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


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteCorpus:
    """Training and held-out bytes of a corpus.

    train, validation: uint8 [num_bytes] views of one read-only mapping, which uses address space but no memory.
    digest: hash of all bytes in order. Ranks and resumed runs compare it to verify that they read the same text.
    """

    train: Tensor
    validation: Tensor
    digest: str
    num_files: int

    @staticmethod
    def open(
        path: str | Sequence[str] | None = None, *, cache_dir: str | None = None, validation_fraction: float = 0.05
    ) -> "ByteCorpus":
        """Opens the text at `path`: one or more files, folders or globs. Defaults to the source code of the Python standard library.

        validation_fraction: fraction of the bytes held out for validation. It is taken from the end of every mebibyte (of the full text
        if it is smaller), so that both parts sample all regions of the text.
        cache_dir: folder of the packed copy. Defaults to the folder ztk below $XDG_CACHE_HOME or ~/.cache.

        Raises ValueError for a path that is missing, empty or unreadable, and for a cache folder that cannot be written.
        """
        if not 0.0 < validation_fraction < 1.0:
            raise ValueError(
                f"data.validation_fraction={validation_fraction}: must lie between 0 and 1, "
                "0.05 keeps a twentieth for validation"
            )
        entries = [path] if isinstance(path, str) else list(path or ())
        files = named_files(entries) if entries else standard_library()
        total = sum(file.size for file in files)
        num_validation = num_held_out(total, share=validation_fraction)
        if num_validation < 2:
            raise ValueError(
                f"data.path={', '.join(entries)}: {total} bytes in {len(files)} files, of which {num_validation} would "
                f"be held out; name more text, or raise data.validation_fraction={validation_fraction}"
            )
        packed = packed_file(files, cache_dir=cache_dir, share=validation_fraction)
        data = mapped(packed, size=total + DIGEST_BYTES, dtype=torch.uint8)
        train, validation, digest = data.split([total - num_validation, num_validation, DIGEST_BYTES])
        return ByteCorpus(train=train, validation=validation, digest=bytes(digest.tolist()).hex(), num_files=len(files))

    def bigram_entropy(self) -> float:
        """Returns the empirical conditional entropy H(next byte | byte) of the held-out bytes, in nats per byte.

        H = -sum over pairs (a, b) of p(a, b) ln p(b | a), counted on the held-out bytes themselves. It is a lower bound for the loss of
        any byte bigram model on this text, even one fitted to it. A model with a lower loss has learned more than pairs.
        """
        counts = _pair_counts(self.validation).double()
        totals = counts.sum(dim=1, keepdim=True)
        return -(torch.xlogy(counts, counts / totals.clamp(min=1)).sum() / counts.sum()).item()


def _pair_counts(data: Tensor) -> Tensor:
    """Returns how often byte b follows byte a, int64 [256, 256]."""
    counts = torch.zeros(256 * 256, dtype=torch.int64)
    block = 1 << 22  # bounds the int64 temporaries to 64 MiB
    for start in range(0, len(data) - 1, block):
        values = data[start : start + block + 1].long()
        counts += torch.bincount(values[:-1] * 256 + values[1:], minlength=256 * 256)
    return counts.view(256, 256)
