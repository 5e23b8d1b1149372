"""What the parts of one `Zero` share."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ztk.optim import FlatOptimizer, GroupTable, TorchStep
from ztk.policies.ema import EmaPolicy
from ztk.policies.zero import ZeroPolicy
from ztk.precision import PrecisionPolicy
from ztk.runtime import MemoryLedger, Mesh, PhaseClock
from ztk.runtime.buffers import BufferPool
from ztk.runtime.part import Part
from ztk.zero.store import Stores

AVERAGE = "ema"  # the kind of state that a moving average of the weights is


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroContext:
    """Policies, stores, ranks and counters.

    groups: the optimizer's parameter groups. piece_size: elements that are updated at once; None: a shard.
    ema: of the average that is kept beside the optimizer's states; None: there is none.
    parts: of the parameters that are cut or copied along other axes than the data's. gathered: the full buffers of sharded buckets.
    """

    policy: ZeroPolicy
    precision: PrecisionPolicy
    optimizer: FlatOptimizer | TorchStep
    groups: GroupTable
    stores: Stores
    mesh: Mesh
    parts: Mapping[str, Part]
    piece_size: int | None
    ledger: MemoryLedger
    clock: PhaseClock
    gathered: BufferPool
    ema: EmaPolicy | None = None

    @property
    def state_names(self) -> tuple[str, ...]:
        """Of the rows that are stored for a piece beside its master weights."""
        return self.optimizer.state_names if self.ema is None else (*self.optimizer.state_names, AVERAGE)

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self.mesh.world.device
