"""Counts the updates that single parameters have missed: while frozen, or without a gradient if such steps leave them unchanged.

Adam corrects its averages by the number of updates of a parameter. torch counts them per parameter. Here the step's control has the run's
count, and this object the number that each parameter missed. The control has the dtype fp32.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ztk.kernels import Control
from ztk.optim.groups import HyperParameters


class MissedUpdates:
    """counts: parameter -> missed updates, only for parameters that missed some. The same on every rank with a part of the parameter."""

    def __init__(self, rows: Sequence[HyperParameters]) -> None:
        """rows: the table of hyperparameters."""
        self.counts: dict[str, int] = {}
        self._corrected = [not row.uncorrected for row in rows]

    def note(self, names: frozenset[str]) -> None:
        """Counts one more missed update for each of `names`."""
        for name in names:
            self.counts[name] = self.counts.get(name, 0) + 1

    def restore(self, counts: Mapping[str, int], *, keep: frozenset[str] = frozenset()) -> None:
        """Restores saved counts; parameters in `keep` stay unchanged."""
        self.counts = {**counts, **{name: count for name, count in self.counts.items() if name in keep}}

    def control_of(self, name: str, *, control: Tensor, group: int) -> Tensor:
        """The row [16] of `control` [groups, 16] for a parameter. If it missed updates, with its own step count and bias corrections."""
        row, missed = control[group], self.counts.get(name, 0)
        if not missed:
            return row
        row = row.clone()
        step = row[Control.step].sub_(missed).to(torch.float64)  # without a wait of the host
        if self._corrected[group]:
            row[Control.bias_correction1] = 1.0 - row[Control.beta1] ** step
            row[Control.bias_correction2_sqrt] = (1.0 - row[Control.beta2] ** step).sqrt()
        return row
