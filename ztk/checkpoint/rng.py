"""Saves a rank's random number generators as tensors."""

import ast
import random

import torch
from torch import Tensor

_CPU, _CUDA, _PYTHON = "torch.cpu", "torch.cuda", "python"


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """Returns uint8 [n] per generator: torch's on the CPU and on `device`, and Python's."""
    text = repr(random.getstate()).encode()
    states = {_CPU: torch.get_rng_state(), _PYTHON: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    if device.type == "cuda":
        states[_CUDA] = torch.cuda.get_rng_state(device)
    return states


def restore_rng(states: dict[str, Tensor], *, device: torch.device) -> None:
    """Sets the generators in `states`, uint8 [n] each, that this device has. An imported checkpoint has none."""
    if not states:
        return
    torch.set_rng_state(states[_CPU])
    random.setstate(ast.literal_eval(bytes(states[_PYTHON].tolist()).decode()))
    if device.type == "cuda" and _CUDA in states:
        torch.cuda.set_rng_state(states[_CUDA], device)
