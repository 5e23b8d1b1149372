"""The values that a training step, its hooks and an evaluation add to the step's row."""

from collections.abc import Iterator, MutableMapping
from numbers import Real
from typing import Any

from torch import Tensor

from ztk.core.policies.columns import column_fault


class Measured(MutableMapping[str, Any]):
    """Numbers by column. writer: the hook's object, or a name; it may change its own values. is_recorded: whether the row is written.

    Raises ValueError for a column of ztk's or of another writer, for another value than a number or a tensor without dimensions, and after
    the row is written.
    """

    def __init__(self) -> None:
        self.writer: Any = "train_step"
        self.is_recorded = False
        self._values: dict[str, Any] = {}
        self._writers: dict[str, Any] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        if fault := column_fault(name):
            raise ValueError(f"loop.measured: {fault}")
        self._check_writer(name)
        if not isinstance(value, Real) and not (isinstance(value, Tensor) and value.dim() == 0):
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            raise ValueError(
                f"loop.measured[{name!r}]: {value!r} is a {type(value).__name__}{shape}; give a number, or a tensor without dimensions"
            )
        self._values[name] = value
        self._writers[name] = self.writer

    def _check_writer(self, name: str) -> None:
        if self.is_recorded:
            raise ValueError(
                f"loop.measured[{name!r}]: the step's row is written: add it in after_step or after_evaluation"
            )
        first = self._writers.get(name, self.writer)
        if first is not self.writer:
            raise ValueError(
                f"loop.measured[{name!r}]: {_label(first)} has written this column in this step, and {_label(self.writer)} would replace "
                "it: use another name"
            )

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __delitem__(self, name: str) -> None:
        self._check_writer(name)
        del self._values[name], self._writers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __ior__(self, values: Any) -> "Measured":
        self.update(values)
        return self

    def __repr__(self) -> str:
        return f"Measured({self._values!r})"


def _label(writer: Any) -> str:
    return writer if isinstance(writer, str) else type(writer).__name__
