"""Random numbers that depend only on their purpose, not on when or where they are drawn, and the process's global generators."""

import ast
import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_TORCH, _PYTHON, _NUMPY = "torch.cpu", "python", "numpy"


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any printable parts; equal on every machine, unlike `hash`."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*parts: object) -> torch.Generator:
    """A CPU generator seeded by `parts`."""
    return torch.Generator().manual_seed(derive_seed(*parts))


def seed_generators(*parts: object) -> None:
    """Seeds the global generators of torch on the CPU, Python, and numpy if it is imported."""
    seed = derive_seed(*parts)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := _numpy()) is not None:
        numpy.random.seed(seed % 2**32)


def generator_states() -> dict[str, Tensor]:
    """Returns uint8 [n] for each global generator: torch's on the CPU, Python's, and numpy's if it is imported."""
    states = {_TORCH: torch.get_rng_state(), _PYTHON: _packed(random.getstate())}
    if (numpy := _numpy()) is not None:
        found = numpy.random.get_state(legacy=False)
        numbers = {
            name: getattr(value, "tolist", lambda value=value: value)() for name, value in found["state"].items()
        }
        states[_NUMPY] = _packed(found | {"state": numbers})
    return states


def set_generators(states: Mapping[str, Tensor]) -> None:
    """Sets the global generators to the result of `generator_states`, as far as `states` has them."""
    if _TORCH in states:
        torch.set_rng_state(states[_TORCH])
    if _PYTHON in states:
        random.setstate(_unpacked(states[_PYTHON]))
    if _NUMPY in states:
        import numpy  # the run that saved the states had imported it

        numpy.random.set_state(_unpacked(states[_NUMPY]))


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restores the global generators on exit."""
    numpy = _numpy()
    before = torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state(legacy=False)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy is not None:
            numpy.random.set_state(before[2])


def _numpy() -> Any:
    """Returns numpy if the process has imported it; nothing has drawn from its generator otherwise."""
    found = sys.modules.get("numpy")
    return found if hasattr(found, "random") else None


def _packed(state: object) -> Tensor:
    return torch.frombuffer(bytearray(repr(state).encode()), dtype=torch.uint8)


def _unpacked(state: Tensor) -> Any:
    return ast.literal_eval(bytes(state.tolist()).decode())
