"""Reads safetensors files one range of one tensor at a time. Values have the dtype of the file.

Files are read, not mapped: the pages of a mapping would stay in the process's memory next to the values that were made of them.
"""

import json
import os
from math import prod

import torch
from safetensors import safe_open
from torch import Tensor

from ztk.core.precision.names import DTYPES
from ztk.core.runtime.host_memory import view_bytes

_LENGTH_BYTES = 8  # of the header's length, at the start of a file


class TensorSlice:
    """A tensor in a file, not read yet."""

    def __init__(self, shape: tuple[int, ...], *, dtype: torch.dtype, at: int, file: "_File") -> None:
        """at: offset of its first byte in the file."""
        self.shape = shape
        self._dtype, self._at, self._file = dtype, at, file

    def full(self) -> Tensor:
        """Reads the full tensor, in the file's shape and dtype."""
        return self.read(0, prod(self.shape)).view(self.shape)

    def read(self, start: int, stop: int) -> Tensor:
        """Reads the flat elements [start, stop)."""
        values = torch.empty(stop - start, dtype=self._dtype)
        self._file.read(values, at=self._at + start * values.itemsize)
        return values


class SafetensorsSlices:
    """The tensors of some files by name, as a context manager that closes the files."""

    def __init__(self, files: list[str]) -> None:
        self._files = [_File(file) for file in files]

    @property
    def nbytes(self) -> int:
        """Bytes read so far."""
        return sum(file.nbytes for file in self._files)

    def __enter__(self) -> dict[str, TensorSlice]:
        return {name: entry for file in self._files for name, entry in file.open().items()}

    def __exit__(self, *raised: object) -> None:
        for file in self._files:
            file.close()


class _File:
    """A safetensors file. nbytes: bytes of values that were read so far."""

    def __init__(self, path: str) -> None:
        self.nbytes = 0
        self._path, self._fd = path, -1

    def open(self) -> dict[str, TensorSlice]:
        """Opens the file and returns its tensors by name. Raises SafetensorError for a damaged file."""
        with safe_open(self._path, framework="pt"):  # compares the header with the file's length
            pass
        self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        length = int.from_bytes(os.pread(self._fd, _LENGTH_BYTES, 0), "little")
        header = json.loads(os.pread(self._fd, length, _LENGTH_BYTES))
        header.pop("__metadata__", None)
        for name, described in header.items():
            if described["dtype"] not in DTYPES:
                raise ValueError(
                    f"{self._path}: {name} has the dtype {described['dtype']}, which is not read; convert it to BF16 or F32"
                )
        return {
            name: TensorSlice(
                tuple(described["shape"]),
                dtype=DTYPES[described["dtype"]],
                at=_LENGTH_BYTES + length + described["data_offsets"][0],
                file=self,
            )
            for name, described in header.items()
        }

    def read(self, values: Tensor, *, at: int) -> None:
        """Fills `values` with the bytes from offset `at`. Raises OSError, also for a file that has become shorter."""
        into, done = view_bytes(values), 0
        while done < len(into):
            count = os.preadv(self._fd, [into[done:]], at + done)
            if count == 0:
                raise OSError(
                    f"{self._path} ends at byte {at + done}, before the end of a tensor: another process has changed it"
                )
            done += count
        self.nbytes += done

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()
