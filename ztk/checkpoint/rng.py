"""Saves a rank's random number generators as tensors."""

import torch
from torch import Tensor

from ztk.core.runtime.seed import generator_states, set_generators

_CUDA = "torch.cuda"


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """Returns uint8 [n] per generator: torch's on the CPU and on `device`, Python's, and numpy's if it is imported."""
    states = generator_states()
    if device.type == "cuda":
        states[_CUDA] = torch.cuda.get_rng_state(device)
    return states


def restore_rng(states: dict[str, Tensor], *, device: torch.device) -> None:
    """Sets the generators in `states`, uint8 [n] each, that this device has. An imported checkpoint has none."""
    set_generators(states)
    if device.type == "cuda" and _CUDA in states:
        torch.cuda.set_rng_state(states[_CUDA], device)
