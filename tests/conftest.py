"""What all tests share: warm rank pools, and kernels that can be interpreted."""

import os

# Read once, when the first test module imports ztk.kernels; only `set_backend("triton")` interprets kernels then. On a machine with
# a GPU: TRITON_INTERPRET=0 pytest -m gpu
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

from tests.ranks import RankPool

# As in the ranks, whose bits some tests compare with what this process computes; the kernels' interpreter is numpy in one thread, too.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks():
    """`ranks(n)` is a pool of n connected processes."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield pool
    for made in pools.values():
        made.close()
