"""The process of one rank around a training program."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from experiments import policies
from ztk import kernels
from ztk.config import Config
from ztk.core.runtime import Process
from ztk.core.runtime.seed import derive_seed


@contextmanager
def started(config: Config) -> Iterator[Process]:
    """This rank, arranged as `topology=` says; stopped at the end, but not after an error, when the launcher ends all ranks.

    Raises ValueError for a topology that does not fit the number of ranks.
    """
    kernels.set_backend(config.kernels.backend)
    process = Process.start(device=config.launch.device, timeout_seconds=config.launch.timeout_seconds)
    yield process.arrange(policies.topology(config))
    process.stop()


def seed_dropout(config: Config, *, process: Process, step: int) -> None:
    """What dropout draws in optimizer step `step` depends on train.seed, the replica and the pipeline stage, not on when the run started: a
    resumed run draws what the uninterrupted one would. Tensor-parallel ranks draw alike, because they drop the same values of full tensors."""
    mesh = process.mesh
    torch.manual_seed(derive_seed(config.train.seed, "dropout", mesh.replica, mesh.comm("pp").rank, step))
