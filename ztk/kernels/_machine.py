"""The three kinds of machine that kernels with matrix products choose their tiles for."""

from enum import StrEnum
from functools import lru_cache

import torch


class Machine(StrEnum):
    """What decides tile sizes: the matrix instructions and the register file they work from."""

    ampere = "ampere"  # mma.sync
    hopper = "hopper"  # wgmma and later
    cdna = "cdna"  # mfma, 64-wide waves


TARGETS_OF = {Machine.ampere: ("sm_80",), Machine.hopper: ("sm_90", "sm_100"), Machine.cdna: ("gfx942",)}


@lru_cache
def machine(device: torch.device) -> Machine:
    """The machine behind a device; the interpreter on CPU tensors plays the one with the smallest tiles."""
    if torch.version.hip or device.type == "cpu":
        return Machine.cdna
    return Machine.hopper if torch.cuda.get_device_capability(device)[0] >= 9 else Machine.ampere
