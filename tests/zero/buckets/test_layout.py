"""The layout is arithmetic: checked over random models without processes."""

import random

import pytest

from ztk.zero.buckets.layout import PARAMETER_ALIGNMENT, SHARD_ALIGNMENT, BucketLayout, ParameterSpec
from ztk.zero.buckets.piece import cut_shard


def random_layout(seed: int) -> BucketLayout:
    rng = random.Random(seed)
    specs = [
        ParameterSpec(
            name=f"p{i}", shape=tuple(rng.randint(0, 40) for _ in range(rng.randint(0, 3))), group=rng.randint(0, 2)
        )
        for i in range(rng.randint(1, 9))
    ]
    return BucketLayout.plan(specs, num_shards=rng.choice([1, 2, 3, 4, 8]))


@pytest.mark.parametrize("seed", range(200))
def test_every_element_has_one_place(seed):
    layout = random_layout(seed)
    covered = [0] * layout.size
    for placement in layout.placements:
        assert placement.offset % PARAMETER_ALIGNMENT == 0
        for element in range(placement.offset, placement.stop):
            covered[element] += 1
    for gap in layout.gaps():
        for element in gap:
            covered[element] += 1
    assert covered == [1] * layout.size
    assert layout.shard_size % SHARD_ALIGNMENT == 0


@pytest.mark.parametrize("seed", range(200))
def test_segments_and_fragments_partition_every_piece(seed):
    layout = random_layout(seed)
    group_at = {}
    for placement in layout.placements:
        group_at.update(dict.fromkeys(range(placement.offset, placement.stop), placement.group))
    seen: dict[str, list[int]] = {placement.name: [] for placement in layout.placements}
    for rank in range(layout.num_shards):
        for span in cut_shard(layout, rank=rank, piece_size=SHARD_ALIGNMENT * (1 + seed % 3)):
            position = span.start
            for segment in layout.segments(span):
                assert segment.start == position < segment.stop
                assert all(group_at.get(e, segment.group) == segment.group for e in range(segment.start, segment.stop))
                position = segment.stop
            assert position == span.stop
            for fragment in layout.fragments(span):
                seen[fragment.name] += range(fragment.start, fragment.stop)
    for placement in layout.placements:
        assert seen[placement.name] == list(range(placement.numel))
