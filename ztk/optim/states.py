"""Layout of the states of a range of parameters in one stored tensor: the row of the master weights first, then the optimizer's.

Rows of float32 are one tensor [k, n]. Compact states have rows of several dtypes, some with one value per group of elements: they are one
tensor of bytes, each row on a multiple of `ROW_ALIGNMENT`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.optim import eight_bit

MASTER = "master"
FROZEN, GRADIENT = "parameter", "gradient"  # other values of a parameter that are saved or moved by name
ROW_ALIGNMENT = 64  # bytes: the same alignment of every row for vector loads and CPU kernels


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRow:
    """One value per element, or per `group` consecutive elements. is_common: all elements have it, even if some lack the optimizer's
    rows."""

    name: str
    dtype: torch.dtype = torch.float32
    group: int = 1
    is_common: bool = False

    def nbytes(self, numel: int) -> int:
        """Bytes without padding."""
        return -(-numel // self.group) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class StateFormat:
    """The data stored per parameter. Every range that a store keeps starts and ends at a multiple of all rows' groups.

    rows: without the master weights, under the names of the update kernel's arguments. master: the dtype of the master weights' row; a
    parameter of this dtype can be its own master. names: the states' names in a checkpoint and for a script.
    is_eight_bit: rows hold the codes of `ztk.kernels.adamw_8bit`, which are decoded for reads and encoded for changes.
    """

    rows: tuple[StateRow, ...]
    names: tuple[str, ...]
    master: torch.dtype = torch.float32
    is_eight_bit: bool = False

    @staticmethod
    def float32(names: tuple[str, ...]) -> "StateFormat":
        """Master weights and states in float32."""
        return StateFormat(rows=tuple(StateRow(name=name) for name in names), names=names)

    def with_row(self, name: str) -> "StateFormat":
        """The format with one more float32 row, which every element has."""
        row = StateRow(name=name, is_common=True)
        return StateFormat(
            rows=(*self.rows, row), names=(*self.names, name), master=self.master, is_eight_bit=self.is_eight_bit
        )

    @property
    def is_plain(self) -> bool:
        """Whether all rows are float32 of the same length."""
        return all(row.dtype is torch.float32 and row.group == 1 for row in self.all_rows(has_master=True))

    def all_rows(self, *, has_master: bool) -> tuple[StateRow, ...]:
        """All rows in the order in which they are stored."""
        master = StateRow(name=MASTER, dtype=self.master, is_common=True)
        return (master, *self.rows) if has_master else self.rows

    def stored(
        self, numel: int, *, has_master: bool, with_rows: int | None = None
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the tensor for `numel` elements. with_rows: number of elements that have the optimizer's rows, if all rows of
        the format are float32. Defaults to all."""
        rows = self.all_rows(has_master=has_master)
        if with_rows is not None:
            size = sum(numel if row.is_common else with_rows for row in rows)
            return (max(size, ROW_ALIGNMENT // 4),), torch.float32  # a store keeps no empty tensor
        if self.is_plain:
            return (len(rows), numel), torch.float32
        return (sum(_padded(row.nbytes(numel)) for row in rows),), torch.uint8

    def bytes_per_element(self, *, has_master: bool) -> float:
        """Bytes per element, without padding."""
        return sum(row.dtype.itemsize / row.group for row in self.all_rows(has_master=has_master))

    def views(self, stored: Tensor, *, numel: int, has_master: bool, with_rows: int | None = None) -> dict[str, Tensor]:
        """The rows of a stored tensor by name: [numel], or [ceil(numel / group)]; the optimizer's rows have [with_rows] if that is
        given."""
        rows = self.all_rows(has_master=has_master)
        views, start = {}, 0
        if with_rows is not None:
            for row in rows:
                size = numel if row.is_common else with_rows
                views[row.name] = stored[start : start + size]
                start += size
            return views
        if self.is_plain:
            return dict(zip((row.name for row in rows), stored, strict=True))
        for row in rows:
            nbytes = row.nbytes(numel)
            views[row.name] = stored[start : start + nbytes].view(row.dtype)
            start += _padded(nbytes)
        return views

    def first_state(self, numel: int, *, with_rows: int | None = None) -> int:
        """The first position after the master weights along dimension 0 of the stored tensor."""
        if with_rows is not None:
            return numel
        return 1 if self.is_plain else _padded(numel * self.master.itemsize)

    def cut(self, rows: Mapping[str, Tensor], *, start: int, stop: int) -> tuple[Tensor, ...]:
        """Elements [start, stop) of `rows`, a subset of this format's rows, in its order."""
        kept = [row for row in self.rows if row.name in rows]
        return tuple(rows[row.name][start // row.group : -(-stop // row.group)] for row in kept)

    def read_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each state as returned by `read`, the master weights' first."""
        if self.is_eight_bit:
            return dict.fromkeys((MASTER, *self.names), torch.float32)
        return {row.name: row.dtype for row in self.all_rows(has_master=True)}

    def described(self) -> dict[str, str]:
        """The format of each state, the master weights' first, one word for a manifest."""
        if self.is_eight_bit:
            return {MASTER: "24 bits"} | dict.fromkeys(self.names, "8 bits")
        return {name: str(dtype).removeprefix("torch.") for name, dtype in self.read_dtypes().items()}

    def read(self, rows: Mapping[str, Tensor], *, master: Tensor) -> dict[str, Tensor]:
        """`master` (its row or the parameter) and the states under `names`, each [numel]: the rows themselves, or their decoded values."""
        if not self.is_eight_bit:
            return {MASTER: master, **{name: rows[name] for name in self.names}}
        return {MASTER: eight_bit.read_master(master, rows=rows), **eight_bit.read_moments(rows)}

    def cast(self, master: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Casts master weights float32 [n] to the parameter."""
        return eight_bit.split(master)[0] if self.is_eight_bit else master.to(dtype)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
