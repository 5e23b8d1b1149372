"""What all tests share: warm rank pools, and kernels that can be interpreted."""

import os

# Read once, when the first test module imports ztk.kernels; only `set_backend("triton")` interprets kernels then. On a machine with
# a GPU: TRITON_INTERPRET=0 pytest -m gpu
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from tests.ranks import RankPool


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
