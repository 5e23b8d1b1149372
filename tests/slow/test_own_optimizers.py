"""300 random optimizers of a user's own at every stage and tier: the bits of torch's plain loop, or a refusal; none silent."""

from collections import Counter

import pytest

from tests.ranks import RankPool
from tests.zero.update.random_wholes import PLACES, outcomes


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_random_optimizers_equal_torchs_loop_or_are_refused(first, show):
    pool = RankPool(1 + first // 50 % 2, seconds=3600)
    try:
        found = pool.run(outcomes, seeds=range(first, first + 50), places=PLACES)[0]
    finally:
        pool.close()
    counts = Counter({kind: len(labels) for kind, labels in found.items()})
    show(f"optimizers {first} to {first + 49}: {dict(counts)}")
    assert not found["silent"], found["silent"][:5]
    assert counts["equal"] > 20 * counts["refused"], found["refused"][:5]
