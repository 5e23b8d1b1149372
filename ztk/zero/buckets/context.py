"""State shared by the parts of one `Zero`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from ztk.core.policies.ema import EmaPolicy
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import PrecisionPolicy
from ztk.core.runtime import MemoryLedger, Mesh, PhaseClock
from ztk.core.runtime.buffers import BufferPool
from ztk.core.runtime.part import Part
from ztk.core.runtime.store import DeviceStore, Stores
from ztk.optim import FlatOptimizer, GroupTable, TorchStep, WholeStep
from ztk.optim.states import StateFormat

AVERAGE = "ema"  # kind of state of the moving average of the weights


def stored_states(optimizer: FlatOptimizer | TorchStep | WholeStep, *, with_average: bool) -> StateFormat:
    """The states stored together per parameter: the optimizer's, and the average if it is kept on their tier."""
    return optimizer.format.with_row(AVERAGE) if with_average else optimizer.format


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroContext:
    """Policies, stores, ranks and counters.

    stores: hold offloaded states, if any are offloaded. resident: the stores of buckets whose optimizer states and reduced gradients stay on
    the device. optimizer_fraction: see `OffloadPolicy`.
    groups: the optimizer's parameter groups. piece_size: elements that are updated at once. If omitted, a whole shard.
    ema: policy of the weights' average, which is stored with the optimizer's states, or in `stores.average` if given. None if there is
    none.
    parts: the parameters that are sharded or replicated along axes other than data parallelism. gathered: pool of the full buffers of sharded
    buckets.
    float8: names of parameters that only float8 products read, which stage 3 gathers in float8.
    """

    policy: ZeroPolicy
    precision: PrecisionPolicy
    optimizer: FlatOptimizer | TorchStep | WholeStep
    groups: GroupTable
    stores: Stores
    mesh: Mesh
    parts: Mapping[str, Part]
    piece_size: int | None
    ledger: MemoryLedger
    clock: PhaseClock
    gathered: BufferPool
    ema: EmaPolicy | None = None
    float8: frozenset[str] = frozenset()
    optimizer_fraction: float = 1.0
    states: StateFormat = field(init=False)  # see `stored_states`
    resident: Stores = field(init=False)

    def __post_init__(self) -> None:
        with_average = self.ema is not None and self.stores.average is None
        object.__setattr__(self, "states", stored_states(self.optimizer, with_average=with_average))
        device = DeviceStore(device=self.device, ledger=self.ledger)
        object.__setattr__(self, "resident", replace(self.stores, optimizer=device, gradients=device))

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of a piece's states without its master weights, as in a checkpoint."""
        return self.states.names if self.stores.average is None else (*self.states.names, AVERAGE)

    @property
    def state_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each state as it is read, the master weights' first."""
        return self.states.read_dtypes() | ({} if self.stores.average is None else {AVERAGE: torch.float32})

    @property
    def described_states(self) -> dict[str, str]:
        """The format of each state, one word for a manifest."""
        return self.states.described() | ({} if self.stores.average is None else {AVERAGE: "float32"})

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self.mesh.world.device
