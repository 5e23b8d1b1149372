"""The process of one rank around a training program."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ztk import kernels
from ztk.config import Config
from ztk.core.policies.launch import LaunchConfig, start_seconds
from ztk.core.runtime import Process, sections
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
    with sections.watch_sections(section_limits(config.launch), process=arranged):
        yield arranged
    process.stop()


def section_limits(launch: LaunchConfig) -> dict[str, float | None]:
    """Returns the limits of `watch_sections`. Empty in tasks that do not train, and with a debugger."""
    if launch.setup_seconds is None or launch.debug is not None:
        return {}
    return {
        sections.SETUP: launch.setup_seconds,
        sections.FIRST_STEP: launch.compile_seconds,
        sections.STEP: launch.step_seconds,
        sections.EVALUATION: launch.eval_seconds,
        sections.SAVE: launch.save_seconds,
    }


def seed_dropout(config: Config, *, process: Process, step: int) -> None:
    """Seeds dropout for optimizer step `step` from train.seed, the replica and the pipeline stage.

    A resumed run thus has the same dropout as an uninterrupted one. Tensor-parallel ranks use the same seed, because they drop the same
    values of full tensors.
    """
    mesh = process.mesh
    torch.manual_seed(derive_seed(config.train.seed, "dropout", mesh.replica, mesh.comm("pp").rank, step))
