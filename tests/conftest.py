"""What all tests share: warm rank pools."""

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
