"""Counter-based random numbers: a number depends only on (seed, step, prompt, sample, position).

A text is thus the same for any distribution of prompts over micro-batches and ranks, and after a resume. The generator is the finalizer
of SplitMix64 (Steele, Lea, Flood 2014, https://doi.org/10.1145/2714064.2660195), applied once per part of the key.
"""

import torch
from torch import Tensor

from ztk.core.runtime.seed import derive_seed

_GAMMA = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_FIRST, _SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def sample_keys(*, seed: int, step: int, prompts: Tensor, samples: Tensor) -> Tensor:
    """Returns one key per sample, int64 [S]. prompts: number of its prompt in the run. samples: its number among the prompt's samples.
    int64 [S] each.
    """
    base = torch.full_like(prompts, derive_seed(seed, "rollout", step))
    return _mixed(_mixed(base, part=prompts), part=samples)


def uniforms(keys: Tensor, *, positions: Tensor) -> Tensor:
    """Returns a number in [0, 1) per key and position: int64 of broadcastable shapes -> float64 on the CPU. It is a multiple of 2^-53."""
    return (_mixed(keys, part=positions) >> 11 & (2**53 - 1)).double() * 2.0**-53


def _mixed(keys: Tensor, *, part: Tensor) -> Tensor:
    """Returns SplitMix64's next state and output, in arithmetic modulo 2^64."""
    x = (keys ^ (part + 1) * _GAMMA) + _GAMMA
    x = (x ^ _shifted(x, by=30)) * _FIRST
    x = (x ^ _shifted(x, by=27)) * _SECOND
    return x ^ _shifted(x, by=31)


def _shifted(x: Tensor, *, by: int) -> Tensor:
    """Returns x >> by, with zeros from the left."""
    return x >> by & ((1 << 64 - by) - 1)
