"""The part of the interface of `ztk.train.engine.Engine` that checkpoints use."""

from typing import Protocol

from torch import Tensor, nn

from ztk.core.precision import LossScalePolicy
from ztk.core.runtime import Comm, MemoryLedger, Process
from ztk.zero.zero import Zero


class Control(Protocol):
    """The owner of the step's scalars."""

    state: Tensor  # fp32 [8]; see ztk.kernels.State
    scaling: LossScalePolicy
    hyper: Tensor  # fp32 [groups, 8]; see ztk.kernels.Hyper


class Subject(Protocol):
    """A model in training."""

    module: nn.Module
    zero: Zero
    control: Control
    process: Process
    comm: Comm
    memory: MemoryLedger
    accumulation_steps: int
    micro_steps: int
    global_steps: int
