"""The process of one rank around a training program."""

from collections.abc import Iterator
from contextlib import contextmanager

from experiments import policies
from ztk import kernels
from ztk.config import Config
from ztk.runtime import Process


@contextmanager
def started(config: Config) -> Iterator[Process]:
    """This rank, arranged as `topology=` says; stopped at the end, but not after an error, when the launcher ends all ranks.

    Raises ValueError for a topology that does not fit the number of ranks.
    """
    kernels.set_backend(config.kernels.backend)
    process = Process.start(device=config.launch.device, timeout_seconds=config.launch.timeout_seconds)
    yield process.arrange(policies.topology(config))
    process.stop()
