"""Messages of float8 shards, without processes: every rank packs, one unpacks."""

import math

import pytest
import torch

from ztk.core.precision.float8 import dequantised, quantise_rows
from ztk.zero.buckets.layout import BucketLayout, ParameterSpec
from ztk.zero.buckets.shard_formats import Float8Shards


def _sent(full: torch.Tensor, *, layout: BucketLayout) -> tuple[torch.Tensor, Float8Shards]:
    """`full` [size] after a gather in which each rank had its own shard only."""
    form = Float8Shards(layout)
    messages = torch.empty(layout.num_shards, form.nbytes, dtype=torch.int8)
    for rank in range(layout.num_shards):
        own = torch.full_like(full, float("nan"))
        shard = layout.shard(rank)
        own[shard.start : shard.stop] = full[shard.start : shard.stop]
        form.pack(own, rank=rank, out=messages[rank])
    received = torch.full_like(full, float("nan"))
    form.unpack(messages, full=received)
    return received, form


@pytest.mark.parametrize(
    ("shapes", "ranks"),
    [([(16, 32), (48, 16)], 2), ([(33, 48), (16, 112), (5, 16)], 3), ([(2, 640)], 5), ([(16, 128)], 4)],
    ids=["aligned", "cut", "longer than a shard", "whole rows"],
)
def test_products_read_the_same_as_from_a_gather_in_16_bits(shapes, ranks):
    layout = BucketLayout.plan(
        [ParameterSpec(name=str(number), shape=shape) for number, shape in enumerate(shapes)], num_shards=ranks
    )
    full = torch.zeros(layout.size, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(ranks)
    for place in layout.placements:
        rows = torch.randn(place.shape, generator=generator) * torch.logspace(-6, 3, place.shape[0])[:, None]
        rows[0] = 0.0
        rows[-1, -1] = 225.0  # rounds to 224
        full[place.offset : place.stop] = rows.bfloat16().view(-1)
    received, form = _sent(full, layout=layout)
    for place in layout.placements:
        exact, rounded = (x[place.offset : place.stop].view(place.shape) for x in (full, received))
        codes, scales = quantise_rows(exact)
        expected = dequantised(codes, scales=scales, dtype=torch.float32)
        again, scales_again = quantise_rows(rounded)
        assert torch.equal(dequantised(again, scales=scales_again, dtype=torch.float32), expected)
        whole = (rounded.float() == expected).all(1)  # the other rows are cut, and exact
        assert torch.equal(rounded[~whole], exact[~whole])
        assert int((~whole).sum()) <= ranks
    for gap in layout.gaps():
        assert not received[gap.start : gap.stop].any()


def test_the_length_of_a_message_is_counted():
    # Two ranks with 768 elements each: rank 0 has 16 rows of 32 and 5 1/3 of 48, rank 1 the rest, with 2/3 of a row at its start.
    layout = BucketLayout.plan(
        [ParameterSpec(name="a", shape=(16, 32)), ParameterSpec(name="b", shape=(21, 48))], num_shards=2
    )
    assert layout.size == 1536
    form = Float8Shards(layout)
    assert (
        form.nbytes == 768 + 2 * 2 * 32 + 32
    )  # codes, two ends of at most 32 elements of bfloat16, 21 rows and padding


def test_an_infinity_arrives_as_one():
    layout = BucketLayout.plan([ParameterSpec(name="a", shape=(16, 32))], num_shards=2)
    full = torch.ones(layout.size, dtype=torch.bfloat16)
    full[70] = math.inf
    received, _ = _sent(full, layout=layout)
    assert not received[64:96].isfinite().any() and received[:64].isfinite().all()
