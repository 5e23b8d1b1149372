"""Ranks of these tests communicate as over NCCL, so that each missing wait is found."""

from collections.abc import Callable

import pytest

from tests.late_nccl import LateRanks
from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks(ranks: Callable[[int], RankPool]) -> Callable[[int], LateRanks]:
    """`ranks(n)` is a pool of n processes connected by late collectives."""
    return lambda world_size: LateRanks(ranks(world_size))
