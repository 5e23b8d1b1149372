"""Reads safetensors files one range of one tensor at a time. Values have the dtype of the file."""

from contextlib import ExitStack
from math import prod
from typing import Any

from safetensors import safe_open
from torch import Tensor


class TensorSlice:
    """A tensor in a file, not read yet."""

    def __init__(self, entry: Any, *, counter: "SafetensorsSlices") -> None:
        self.shape = tuple(entry.get_shape())
        self._entry, self._counter = entry, counter

    def full(self) -> Tensor:
        """Reads the full tensor, in the file's shape and dtype."""
        return self._counted(self._entry[...])

    def read(self, start: int, stop: int) -> Tensor:
        """Returns flat elements [start, stop). Reads only the rows that contain them."""
        if len(self.shape) == 0:
            return self.full().view(1)[start:stop]
        row = max(1, prod(self.shape[1:]))
        first, last = start // row, -(-stop // row)
        return self._counted(self._entry[first:last]).reshape(-1)[start - first * row : stop - first * row]

    def _counted(self, values: Tensor) -> Tensor:
        self._counter.nbytes += values.nbytes
        return values


class SafetensorsSlices:
    """The tensors of some files by name, as a context manager that closes the files. nbytes: read so far."""

    def __init__(self, files: list[str]) -> None:
        self.nbytes = 0
        self._files, self._stack = files, ExitStack()

    def __enter__(self) -> dict[str, TensorSlice]:
        found = {}
        for file in self._files:
            handle = self._stack.enter_context(safe_open(file, framework="pt"))
            for key in handle.keys():  # noqa: SIM118 - no mapping
                found[key] = TensorSlice(handle.get_slice(key), counter=self)
        return found

    def __exit__(self, *raised: object) -> None:
        self._stack.__exit__(*raised)
