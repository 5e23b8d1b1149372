"""Parameters that are read in parts: a rank of several reads only the rows or columns that it computes with."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ztk.core.runtime.boxes import Box


@runtime_checkable
class Divided(Protocol):
    """Parameters by name of which parts can be read."""

    def shape_of(self, name: str) -> tuple[int, ...]: ...

    def part(self, name: str, *, box: Box) -> Tensor: ...  # in the box's shape, on the CPU

    def largest(self, name: str, *, box: Box, axis: int) -> Tensor: ...  # absolute values, without the axis


class Whole:
    """A `Divided` over full parameters, which keeps the last one, because its parts are read one after the other."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state
        self._last: tuple[str, Tensor] | None = None

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self._full(name).shape)

    def part(self, name: str, *, box: Box) -> Tensor:
        return self._full(name)[box.slices]

    def largest(self, name: str, *, box: Box, axis: int) -> Tensor:
        return self._full(name)[box.slices].abs().amax(axis)

    def _full(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = (name, self._state[name].detach())
        return self._last[1]


class Stored:
    """A part of the parameter `name`, which `read` reads. Indices and `t` have a tensor's meaning.

    axes: axes of the box in this part's order. The box has one index along each of the others.
    """

    def __init__(self, source: Divided, name: str, *, box: Box, axes: tuple[int, ...]) -> None:
        self._source, self.name, self._box, self._axes = source, name, box, axes

    @classmethod
    def of(cls, source: Divided, name: str) -> "Stored":
        """The full parameter."""
        shape = source.shape_of(name)
        return cls(source, name, box=Box(start=(0,) * len(shape), shape=shape), axes=tuple(range(len(shape))))

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes along its axes."""
        return tuple(self._box.shape[axis] for axis in self._axes)

    def __getitem__(self, index: "int | slice | tuple[slice, ...]") -> "Stored":
        if isinstance(index, int):
            first, *rest = self._axes
            box = self._box.narrowed(first, start=index, stop=index + 1)
            return Stored(self._source, self.name, box=box, axes=tuple(rest))
        box = self._box
        for axis, part in zip(self._axes, index if isinstance(index, tuple) else (index,), strict=False):
            start, stop, _ = part.indices(self._box.shape[axis])
            box = box.narrowed(axis, start=start, stop=stop)
        return Stored(self._source, self.name, box=box, axes=self._axes)

    def t(self) -> "Stored":
        """Transposed, of two dimensions."""
        return Stored(self._source, self.name, box=self._box, axes=self._axes[::-1])

    def read(self) -> Tensor:
        """The values, contiguous, of the stored dtype."""
        single = tuple(axis for axis in range(len(self._box.shape)) if axis not in self._axes)
        found = self._source.part(self.name, box=self._box)
        return found.permute(*single, *self._axes).reshape(self.shape).contiguous()

    def largest(self) -> Tensor:
        """The largest absolute value of each row of a matrix, of the stored dtype."""
        rows, columns = self._axes
        return self._source.largest(self.name, box=self._box, axis=columns).reshape(self._box.shape[rows])


def divided(state: Mapping[str, Tensor]) -> Divided:
    """The state itself if it is divided, or full parameters."""
    return state if isinstance(state, Divided) else Whole(state)


def rows_of_largest(weight: "Tensor | Stored") -> Tensor:
    """fp32 [out]: the largest absolute value of each row of a weight [out, in]."""
    found = weight.largest() if isinstance(weight, Stored) else weight.abs().amax(-1)
    return found.to(torch.float32)


def values_of(weight: "Tensor | Stored") -> Tensor:
    """fp32 on the CPU where the weight is stored; a tensor stays."""
    return weight.read().to(device="cpu", dtype=torch.float32) if isinstance(weight, Stored) else weight
