"""`log`: values of a model, a loss or a hook for the row of the step."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ztk.core.policies.columns import column_fault
from ztk.core.runtime.comm import Comm

# Functions of torch.utils.checkpoint that run a forward again, in a backward.
_REPEATING = ("unpack_hook", "recompute_fn", "backward")


class Logged:
    """Sums and numbers of calls by column. Tensors stay on their device until `means`. is_recorded: whether the row is written."""

    def __init__(self) -> None:
        self.is_recorded = False
        self._sums: dict[str, float | Tensor] = {}
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, name: str, value: Any) -> None:
        """Adds a call. Raises ValueError for a column of ztk's, another value than a number, and after the row is written."""
        if fault := column_fault(name):
            raise ValueError(f"ztk.log: {fault}")
        if self.is_recorded:
            raise ValueError(
                f"ztk.log({name!r}, ...): the step's row is written: call it in after_step or after_evaluation"
            )
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.detach().double().reshape(())
        elif not isinstance(value, Real):
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            raise ValueError(
                f"ztk.log({name!r}, ...) got a {type(value).__name__}{shape}: give a number, or a tensor with one element"
            )
        self._sums[name] = self._sums.get(name, 0.0) + value
        self._counts[name] = self._counts.get(name, 0) + 1

    def means(self, comm: Comm) -> dict[str, float]:
        """Returns the means over all calls of all ranks. A collective call, which waits for the device."""
        tensors = [value for value in self._sums.values() if isinstance(value, Tensor)]
        read = iter(torch.stack([value.to(comm.device) for value in tensors]).tolist() if tensors else ())
        own = {
            name: (next(read) if isinstance(value, Tensor) else float(value), self._counts[name])
            for name, value in self._sums.items()
        }
        ranks = comm.gather_objects(own)
        found = {}
        for name in dict.fromkeys(name for rank in ranks for name in rank):
            totals, counts = zip(*(rank[name] for rank in ranks if name in rank), strict=True)
            finite = all(map(math.isfinite, totals))
            found[name] = (math.fsum(totals) if finite else sum(totals)) / sum(counts)
        return found


_open: list[Logged] = []  # the innermost is last; threads of a backward share it


def log(name: str, value: float | Tensor) -> None:
    """Adds `value` to column `name` of the step's row: the mean over all calls in the step, of all micro-batches and ranks.

    For models, losses and hooks. In an evaluation the column is `validation_NAME`. A forward that a backward repeats does not count again.
    Without a running `ztk.Loop` it does nothing. A tensor stays on its device until a row is written.

    Raises ValueError for a column of ztk's, and for another value than a number or a tensor with one element.
    """
    if _open and not _is_repeated():
        _open[-1].add(name, value)


@contextmanager
def logging_to(logged: Logged) -> Iterator[Logged]:
    """Collects the calls of `log` inside."""
    _open.append(logged)
    try:
        yield logged
    finally:
        _open.pop()


def _is_repeated() -> bool:
    """Returns whether a recomputation of activations calls: ztk's, DeepSpeed's and transformers' use torch's."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in _REPEATING and frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False
