"""The process of one rank around a training program."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ztk import kernels
from ztk.config import Config
from ztk.core.policies.launch import start_seconds
from ztk.core.runtime import Process
from ztk.core.runtime.seed import derive_seed, seed_generators
from ztk.experiments import policies


@contextmanager
def started(config: Config) -> Iterator[Process]:
    """Yields this rank's process, arranged according to `topology=`. The global generators are seeded from train.seed and the replica.

    Stops it at the end, except after an error, when the launcher stops all ranks.

    Raises ValueError for a topology that does not fit the number of ranks.
    """
    kernels.set_backend(config.kernels.backend)
    process = Process.start(
        device=config.launch.device,
        timeout_seconds=config.launch.timeout_seconds,
        start_seconds=start_seconds(config.launch),
    )
    arranged = process.arrange(policies.topology(config))
    seed_generators(config.train.seed, "rank", arranged.mesh.replica)
    yield arranged
    process.stop()


def seed_dropout(config: Config, *, process: Process, step: int) -> None:
    """Seeds dropout for optimizer step `step` from train.seed, the replica and the pipeline stage.

    A resumed run thus has the same dropout as an uninterrupted one. Tensor-parallel ranks use the same seed, because they drop the same
    values of full tensors.
    """
    mesh = process.mesh
    torch.manual_seed(derive_seed(config.train.seed, "dropout", mesh.replica, mesh.comm("pp").rank, step))
