"""Counts at 4, 16 and 64 ranks give the cost of a start of 1,024 ranks: each grows by the amount per rank that the code implies."""

import pytest

from tests.cluster.counting import count, extended

pytestmark = pytest.mark.slow  # 84 processes


def test_counts_grow_with_the_ranks_as_derived_from_the_code():
    found = {world: count(world) for world in (4, 16, 64)}
    per_name = {name: {world: own[name] for world, own in found.items()} for name in found[4]}
    for name, values in per_name.items():
        print(name, values, f"1,024 ranks: {extended(values):,.0f}")
    # Every rank calls new_group for each group of an axis: N/2 of tensor=2, two of data, one each of Comm and Interrupts.
    assert per_name["new_group calls per rank"] == {world: world / 2 + 4 for world in found}
    # gloo connects all pairs of a group: the world's three groups and half a world of data; rank 0 serves the store to all.
    descriptors = per_name["descriptors per rank"]
    assert (descriptors[64] - descriptors[16]) / 48 == pytest.approx(4.5, abs=0.1)
    # One key of a rank in each of its five groups, and three of the handshake.
    assert per_name["store keys"] == {world: 8 * world + 1 for world in found}
    # gloo has 8 bytes for each pair of a group.
    stored = per_name["store bytes"]
    slopes = (stored[16] - stored[4]) / 12, (stored[64] - stored[16]) / 48
    assert (slopes[1] - slopes[0]) / 60 == pytest.approx(8 * 3.5, rel=0.1)
    assert set(per_name["collectives per interrupt check"].values()) == {1}
