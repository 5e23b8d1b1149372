"""The tiles of products of tokens with the weights of their experts."""

import functools
from dataclasses import dataclass

from ztk.kernels._machine import Architecture


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """Tile, reduction step, warps and pipeline stages. programs: that stay on a processor: of two, one computes while the other one stores its
    tile and loads the first steps of its next."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int = 2

    @staticmethod
    @functools.cache
    def for_product(*, itemsize: int, architecture: Architecture) -> "LaunchConfig":
        """16-bit: 64 accumulators per thread, and as many stages as shared memory holds (64 KiB on CDNA). On Ampere operands of the products
        are in registers too, so that one program fits."""
        if itemsize == 4:
            return LaunchConfig(block_m=32, block_n=64, block_k=32, num_warps=4, num_stages=1)
        if architecture is Architecture.cdna:
            return LaunchConfig(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=2)
        programs = 1 if architecture is Architecture.ampere else 2
        return LaunchConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3, programs=programs)
