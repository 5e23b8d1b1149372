"""Ranges of flattened tensors as boxes: the same elements as by lists of positions."""

import random
from math import prod

import pytest
import torch

from ztk.core.runtime.boxes import Box, boxes_of

SHAPES = [(), (1,), (7,), (3, 5), (4, 1, 6), (2, 3, 4, 5), (0, 4), (5, 0)]


def elements(box: Box, *, shape: tuple[int, ...]) -> torch.Tensor:
    """Flat positions in a tensor of `shape`."""
    full = torch.arange(prod(shape)).view(shape)
    places = tuple(slice(start, start + size) for start, size in zip(box.start, box.shape, strict=True))
    return full[places].flatten().contiguous()


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_cover_a_range_in_order(shape):
    for start in range(prod(shape) + 1):
        for stop in range(start, prod(shape) + 1):
            boxes = list(boxes_of(shape, start=start, stop=stop))
            assert len(boxes) <= max(1, 2 * len(shape) - 1)
            found = [elements(box, shape=shape) for box in boxes]
            assert torch.equal(torch.cat([torch.arange(0), *found]), torch.arange(start, stop))


def random_box(shape: tuple[int, ...], *, chance: random.Random) -> Box:
    starts = [chance.randrange(size) for size in shape]
    sizes = [chance.randint(1, size - start) for size, start in zip(shape, starts, strict=True)]
    return Box(start=tuple(starts), shape=tuple(sizes))


def test_overlaps_are_found_and_read_through_few_elements():
    chance = random.Random(0)
    shape = (4, 6, 5)
    full = torch.arange(prod(shape)).view(shape)
    for _ in range(300):
        one, other = random_box(shape, chance=chance), random_box(shape, chance=chance)
        both = set(elements(one, shape=shape).tolist()) & set(elements(other, shape=shape).tolist())
        common = one.overlap(other)
        assert (set(elements(common, shape=shape).tolist()) if common else set()) == both
        if common is None:
            continue
        limit, values, seen = chance.randint(1, 40), elements(one, shape=shape), []
        for piece in common.rows(outer=one, limit=limit):
            span, first = piece.span_in(one), piece.first_in(one)
            assert span <= limit or piece.numel == 1
            part = values[first : first + span]
            seen += piece.view(part, outer=one, first=first).flatten().tolist()
        assert seen == elements(common, shape=shape).tolist()
    assert torch.equal(
        Box(start=(1, 2, 0), shape=(2, 1, 5)).view(full.view(-1), outer=Box(start=(0, 0, 0), shape=shape), first=0),
        full[1:3, 2:3],
    )


def test_the_cost_does_not_grow_with_the_elements():
    """A million million elements: a list of positions would not fit."""
    wanted = Box(start=(3, 1000), shape=(10**6 - 3, 10))
    held = list(boxes_of((10**6, 10**6), start=5, stop=10**12 - 7))
    assert sum(common.numel for box in held if (common := box.overlap(wanted))) == wanted.numel
