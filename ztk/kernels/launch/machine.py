"""The machines that launchers choose tiles, threads and grids for."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import torch


class Architecture(StrEnum):
    """Architectures with different tiles of matrix products, because of instructions, register file and shared memory."""

    ampere = "ampere"  # mma.sync; consumer chips of every generation, with 99 KiB of shared memory
    hopper = "hopper"  # wgmma: accumulators in registers, 227 KiB of shared memory
    blackwell = "blackwell"  # tcgen05: accumulators in their own memory
    cdna = "cdna"  # mfma, 64-wide waves, 64 KiB of shared memory


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)  # one object per machine, which launchers' caches look up
class Machine:
    """Properties of a device that launchers depend on."""

    architecture: Architecture
    warp_size: int
    processors: int  # multiprocessors or compute units
    dependent_launch: bool = False  # a kernel may be launched before the one in front of it has ended


# One machine per compilation target: an A100, an H100 or H200, a B200, an MI300X.
MACHINES = {
    "sm_80": Machine(architecture=Architecture.ampere, warp_size=32, processors=108),
    "sm_90": Machine(architecture=Architecture.hopper, warp_size=32, processors=132, dependent_launch=True),
    "sm_100": Machine(architecture=Architecture.blackwell, warp_size=32, processors=148, dependent_launch=True),
    "gfx942": Machine(architecture=Architecture.cdna, warp_size=64, processors=304),
}
# The interpreter, unless a test assumes another: the smallest tiles, and programs that share rows out unevenly.
INTERPRETER = Machine(architecture=Architecture.cdna, warp_size=32, processors=2)

_assumed: Machine | None = None


def machine(device: torch.device) -> Machine:
    """The machine of a device, or the one set by `assume`."""
    if _assumed is not None:
        return _assumed
    return _of_device(device)


@contextmanager
def assume(assumed: Machine) -> Iterator[None]:
    """Launchers choose for this machine inside the context: ahead-of-time compilation, and the interpreter in tests."""
    global _assumed
    before, _assumed = _assumed, assumed
    try:
        yield
    finally:
        _assumed = before


@lru_cache
def _of_device(device: torch.device) -> Machine:
    if device.type != "cuda":
        return INTERPRETER
    index = device.index
    processors = torch.cuda.get_device_properties(index).multi_processor_count
    if torch.version.hip:
        return Machine(architecture=Architecture.cdna, warp_size=64, processors=processors)
    major = torch.cuda.get_device_capability(index)[0]
    architecture = {9: Architecture.hopper, 10: Architecture.blackwell}.get(major, Architecture.ampere)
    # Drivers before CUDA 12.3 do not record such launches into graphs.
    early = architecture is not Architecture.ampere and _driver_version() >= 12030
    return Machine(architecture=architecture, warp_size=32, processors=processors, dependent_launch=early)


def _driver_version() -> int:
    """The newest version of CUDA that the driver supports, 1000 * major + 10 * minor. Asked of the driver, because torch has no function
    for it."""
    version = ctypes.c_int()
    if (status := ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))) != 0:
        raise RuntimeError(f"cannot read the version of the GPU's driver: cuDriverGetVersion returned {status}")
    return version.value
