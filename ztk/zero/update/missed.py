"""Updates that single parameters have missed: frozen for a while, or without a gradient where such steps leave them alone.

Adam corrects its averages by the number of updates that they have seen. Torch's counts them for every parameter; here the step's control counts
those of the run, and this object what a parameter has missed of them. The control has the dtype fp32.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ztk.kernels import Control
from ztk.optim.groups import HyperParameters


class MissedUpdates:
    """counts: parameter -> updates that it has missed; those that have missed none are not in it. The same on every rank that has a part."""

    def __init__(self, rows: Sequence[HyperParameters]) -> None:
        """rows: of the table of hyperparameters."""
        self.counts: dict[str, int] = {}
        self._corrected = [not row.uncorrected for row in rows]

    def note(self, names: frozenset[str]) -> None:
        """One more, of `names`."""
        for name in names:
            self.counts[name] = self.counts.get(name, 0) + 1

    def restore(self, counts: Mapping[str, int], *, keep: frozenset[str] = frozenset()) -> None:
        """Goes on from there; parameters in `keep` stay as they are."""
        self.counts = {**counts, **{name: count for name, count in self.counts.items() if name in keep}}

    def control_of(self, name: str, *, control: Tensor, group: int) -> Tensor:
        """The row [16] of `control` [groups, 16] for a parameter. One that has missed updates has its own step, and bias corrections for it."""
        row, missed = control[group], self.counts.get(name, 0)
        if not missed:
            return row
        row = row.clone()
        step = row[Control.step].sub_(missed).to(torch.float64)  # the host does not wait
        if self._corrected[group]:
            row[Control.bias_correction1] = 1.0 - row[Control.beta1] ** step
            row[Control.bias_correction2_sqrt] = (1.0 - row[Control.beta2] ** step).sqrt()
        return row
