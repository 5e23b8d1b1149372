"""Rules of `kernels.log_every`: it needs steps that write rows, and hardware numbers of this run's device."""

from collections.abc import Iterator

from ztk.core.policies.config import Config
from ztk.core.policies.hardware import CEILINGS, HERE
from ztk.core.policies.machine import Machine
from ztk.core.policies.runs import device_of, times_kernels
from ztk.core.policies.train import KernelBackend, LoggerMode


def kernel_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    """Yields one line per fault, with its fix."""
    every = config.kernels.log_every or 0
    if every <= 0 or not times_kernels(config):
        return
    asked = f"kernels.log_every={every}"
    yield from _row_faults(config, asked=asked, every=every)
    if config.kernels.backend is KernelBackend.reference:
        yield f"{asked} times ztk's operations and kernels=reference uses none: use kernels=auto, or kernels.log_every=0"
    yield from _ceiling_faults(config, machine=machine)


def _row_faults(config: Config, *, asked: str, every: int) -> Iterator[str]:
    train, logger = config.train, config.logger
    if train.log_every > 0 and every % train.log_every:
        fitting = -(-every // train.log_every) * train.log_every
        yield f"{asked} is not a multiple of train.log_every={train.log_every}, which makes the rows: use kernels.log_every={fitting}"
    elif logger.mode is not LoggerMode.disabled and logger.every and logger.every > 0 and every % logger.every:
        fitting = -(-every // logger.every) * logger.every
        yield f"{asked} is not a multiple of logger.every={logger.every}, which the logger gets: use kernels.log_every={fitting}"
    if every > train.steps > 0:
        yield f"{asked} is more than train.steps={train.steps}, so no step would be timed: use kernels.log_every={train.steps}"


def _ceiling_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    hardware = config.hardware
    if hardware.name not in (None, HERE) and device_of(config, machine=machine) == "cpu":
        yield (
            f"hardware={hardware.name}: this run computes on the CPU, whose share of the floor would be another device's: use hardware=here, "
            "or leave it out"
        )
    missing = [name for name in CEILINGS if getattr(hardware, name) is None]
    if missing and (hardware.name is not None or len(missing) < len(CEILINGS)):
        keys = " ".join(f"hardware.{name}=VALUE" for name in missing)
        yield f"hardware.{missing[0]} has no value: choose hardware=h100 or another, or add {keys}"
