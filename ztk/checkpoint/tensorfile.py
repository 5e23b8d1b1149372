"""Writes a safetensors file in pieces, with a header that precedes the values.

The format is 8 bytes of header length, a JSON header, then the tensors' bytes without gaps
(https://github.com/huggingface/safetensors#format). Any safetensors reader opens these files.
"""

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ztk.checkpoint.bits import BlockChecksums
from ztk.checkpoint.errors import CheckpointError
from ztk.core.precision.names import DTYPE_NAMES
from ztk.core.runtime.host_memory import view_bytes

COPY_BYTES = 16 << 20  # bytes per copy from an accelerator to the host


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A tensor before it has an offset in a file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class TensorFileWriter:
    """Writes the tensors of `specs` in any order, each from start to end in any number of parts."""

    def __init__(self, path: Path, *, specs: Iterable[TensorSpec], metadata: dict[str, str] | None = None) -> None:
        """Creates the file at its full length. It must not exist. Raises OSError."""
        self.path = path
        # Wide types first, so that every tensor is aligned to its items. Some readers need this to map a tensor without a copy.
        ordered = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
        header, offsets = _header(ordered, metadata=metadata)
        self.header_nbytes = len(header)
        self.header_crc32 = zlib.crc32(header)
        self._specs = {spec.key: spec for spec in ordered}
        self._offsets = offsets
        self._written = dict.fromkeys(offsets, 0)
        self._checksums = {key: BlockChecksums() for key in offsets}
        self.nbytes = len(header) + sum(spec.nbytes for spec in ordered)
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_at(self._fd, data=memoryview(header), offset=0, path=path)
        except OSError:
            self.close()
            raise

    def append(self, key: str, *, value: Tensor) -> None:
        """Appends the next elements of tensor `key`, in any shape and on any device. Raises OSError."""
        flat = value.detach().reshape(-1)
        step = flat.numel() if flat.device.type == "cpu" else COPY_BYTES // flat.itemsize
        for start in range(0, flat.numel(), max(step, 1)):
            self._append_host(key, value=flat[start : start + step].cpu())

    def _append_host(self, key: str, *, value: Tensor) -> None:
        assert value.dtype == self._specs[key].dtype, (key, value.dtype)
        data = view_bytes(value)
        done = self._written[key]
        assert done + len(data) <= self._specs[key].nbytes, key
        write_at(self._fd, data=data, offset=self.header_nbytes + self._offsets[key] + done, path=self.path)
        self._checksums[key].add(data)
        self._written[key] = done + len(data)

    def finish(self) -> None:
        """Syncs the file. Raises OSError."""
        for key, spec in self._specs.items():
            assert self._written[key] == spec.nbytes, f"{key}: {self._written[key]} of {spec.nbytes} bytes"
        fsync(self._fd, path=self.path)
        self.close()

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def offset(self, key: str) -> int:
        """Returns the offset of tensor `key` in the file."""
        return self.header_nbytes + self._offsets[key]

    def checksums(self, key: str) -> list[int]:
        """Returns the crc32 per block of tensor `key`."""
        return self._checksums[key].values


def write_tensors(
    path: Path, *, specs: Sequence[TensorSpec], ranges: Callable[[str], Iterable[Tensor]]
) -> TensorFileWriter:
    """Writes a file and returns its closed writer. ranges: key -> the tensor's values in order, in parts of any shape. Raises OSError."""
    writer = TensorFileWriter(path, specs=specs, metadata={"format": "pt"})
    try:
        for spec in specs:
            for values in ranges(spec.key):
                writer.append(spec.key, value=values)
        writer.finish()
    finally:
        writer.close()
    return writer


def check_tensors(written: TensorFileWriter, *, specs: Sequence[TensorSpec]) -> None:
    """Reads the file of `write_tensors` and compares it with the written tensors.

    Raises:
        CheckpointError: its names, shapes, dtypes or bytes differ.
    """
    with safe_open(written.path, framework="pt") as file:
        found = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - the file is no mapping
        kinds = {key: (one.get_dtype(), tuple(one.get_shape())) for key, one in found.items()}
    differing = sorted(
        key for key, _ in kinds.items() ^ {s.key: (DTYPE_NAMES[s.dtype], s.shape) for s in specs}.items()
    )
    with open(written.path, "rb") as file:
        for spec in specs:
            checksums, left = BlockChecksums(), spec.nbytes
            file.seek(written.offset(spec.key))
            while left and (data := file.read(min(left, COPY_BYTES))):
                checksums.add(memoryview(data))
                left -= len(data)
            differing += [spec.key] if left or checksums.values != written.checksums(spec.key) else []
    if differing:
        raise CheckpointError(
            f"{written.path}: {differing[0]} differs from its value before the write: write it again on another disk"
        )


def _header(specs: list[TensorSpec], *, metadata: dict[str, str] | None) -> tuple[bytes, dict[str, int]]:
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    offsets, offset = {}, 0
    for spec in specs:
        assert spec.key not in offsets, spec.key
        offsets[spec.key] = offset
        entries[spec.key] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format requires data aligned to 8 bytes
    return struct.pack("<Q", len(text)) + text, offsets


def write_at(fd: int, *, data: memoryview, offset: int, path: Path) -> None:
    """Writes all of `data` at `offset`.

    Raises:
        OSError: with the file's name.
    """
    while len(data):
        try:
            done = os.pwrite(fd, data, offset)
        except OSError as error:
            raise OSError(error.errno, f"{os.strerror(error.errno)} (writing at byte {offset})", str(path)) from error
        data, offset = data[done:], offset + done


def fsync(fd: int, *, path: Path) -> None:
    """Syncs the file. A failed delayed write is reported here first.

    Raises:
        OSError: with the file's name.
    """
    try:
        os.fsync(fd)
    except OSError as error:
        raise OSError(error.errno, f"{os.strerror(error.errno)} (fsync)", str(path)) from error
