"""The kinds of machine that kernels with matrix products choose their tiles for."""

from enum import StrEnum
from functools import lru_cache

import torch


class Machine(StrEnum):
    """What decides tile sizes: the matrix instructions, the register file and the shared memory they work from."""

    ampere = "ampere"  # mma.sync; consumer chips of every generation, with 99 KiB of shared memory
    hopper = "hopper"  # wgmma: accumulators in registers, 227 KiB of shared memory
    blackwell = "blackwell"  # tcgen05: accumulators in their own memory
    cdna = "cdna"  # mfma, 64-wide waves, 64 KiB of shared memory


TARGET_OF = {
    Machine.ampere: "sm_80",
    Machine.hopper: "sm_90",
    Machine.blackwell: "sm_100",
    Machine.cdna: "gfx942",
}


@lru_cache
def machine(device: torch.device) -> Machine:
    """The machine behind a device; the interpreter on CPU tensors plays the one with the smallest tiles."""
    if torch.version.hip or device.type == "cpu":
        return Machine.cdna
    major = torch.cuda.get_device_capability(device)[0]
    return {9: Machine.hopper, 10: Machine.blackwell}.get(major, Machine.ampere)
