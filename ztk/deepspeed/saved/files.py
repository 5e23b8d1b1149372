"""`deepspeed.runtime.checkpoint_engine`: torch.save and torch.load with DeepSpeed's interface, for scripts that write files themselves.

An engine's checkpoints are not pickles, so `save_checkpoint` and `load_checkpoint` do not use this module, and replaced methods have no
effect on them.
"""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ztk.deepspeed.optimizers.loss_scaler import DynamicLossScaler, LossScaler
from ztk.deepspeed.saved.types import ZeroStageEnum, fragment_address
from ztk.deepspeed.tools.log import log_dist


@dataclass
class CheckpointCommitInfo:
    """Identifies the checkpoint for `create` and `commit`."""

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(ABC):
    """Reads and writes the files of a checkpoint."""

    name: str | None = None

    def __init__(self, config_params: object = None) -> None:
        """config_params: accepted and ignored."""
        del config_params

    @abstractmethod
    def create(self, info: CheckpointCommitInfo) -> None:
        """Called at the start of a checkpoint."""

    @abstractmethod
    def save(self, state_dict: object, path: str | os.PathLike) -> None:
        """Writes one file."""

    @abstractmethod
    def load(self, path: str | os.PathLike, map_location: object = None) -> object:
        """Reads a file of `save`."""

    @abstractmethod
    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Called after all files are written. Returns True if they are safe."""

    def makedirs(self, path: str | os.PathLike, exist_ok: bool = False) -> None:
        """Calls os.makedirs."""
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Returns whether this data-parallel rank writes files that are equal on all of them: the first rank does."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Returns whether files are written in the background."""
        return False

    def cleanup(self) -> None:
        """Does nothing: there is no state."""
        return


class TorchCheckpointEngine(CheckpointEngine):
    """torch.save and torch.load. Files may contain tensors, plain values and the types in DeepSpeed's checkpoints.

    Other types raise pickle.UnpicklingError, because reading them would run their code. Allow them with
    `torch.serialization.add_safe_globals`.
    """

    name = "TorchCheckpointEngine"

    def create(self, info: CheckpointCommitInfo) -> None:
        log_dist(f"[Torch] checkpoint {info.tag} is about to be saved", ranks=[0])

    def save(self, state_dict: object, path: str | os.PathLike) -> None:
        torch.save(state_dict, path)

    def load(self, path: str | os.PathLike, map_location: object = None) -> object:
        known = [ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address]
        with torch.serialization.safe_globals(known):
            return torch.load(path, map_location=map_location, weights_only=True)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True
