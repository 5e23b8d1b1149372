"""`deepspeed.runtime.checkpoint_engine`: torch.save and torch.load behind DeepSpeed's interface, for scripts that write files themselves.

An engine's checkpoints are not pickles, so `save_checkpoint` and `load_checkpoint` use none of this, and a replaced method changes nothing.
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
    """Of which checkpoint `create` and `commit` are said."""

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(ABC):
    """What reads and writes the files of a checkpoint."""

    name: str | None = None

    def __init__(self, config_params: object = None) -> None:
        """config_params: accepted; there is nothing to configure."""
        del config_params

    @abstractmethod
    def create(self, info: CheckpointCommitInfo) -> None:
        """A checkpoint begins."""

    @abstractmethod
    def save(self, state_dict: object, path: str | os.PathLike) -> None:
        """Writes one file."""

    @abstractmethod
    def load(self, path: str | os.PathLike, map_location: object = None) -> object:
        """What `save` wrote."""

    @abstractmethod
    def commit(self, info: CheckpointCommitInfo) -> bool:
        """All files of the checkpoint are written; True if they are safe."""

    def makedirs(self, path: str | os.PathLike, exist_ok: bool = False) -> None:
        """As os.makedirs."""
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Whether that data-parallel rank writes files that are equal on all of them: the first does."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Whether files are written behind the training."""
        return False

    def cleanup(self) -> None:
        """Nothing is kept."""
        return


class TorchCheckpointEngine(CheckpointEngine):
    """torch.save and torch.load. A file may hold tensors, plain values and the types that DeepSpeed's checkpoints name; another type raises
    pickle.UnpicklingError, because reading it would run its code: allow it by `torch.serialization.add_safe_globals`.
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
