"""Streams over datasets: draws from the global generators depend on the item alone."""

import random

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset

from ztk.core.runtime.seed import generator_states, kept_generators, seed_generators, set_generators
from ztk.data import ItemStream, Share, held_out_items


def drawn() -> list[float]:
    return [random.random(), float(numpy.random.rand()), torch.rand(()).item(), float(numpy.random.normal())]


class Noisy(Dataset):
    """Ten items that draw from each generator."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([index, *drawn()], dtype=torch.float64)


class Stream(IterableDataset):
    """Seven items, again in every pass."""

    def __iter__(self):
        for index in range(7):
            yield torch.tensor([index, *drawn()], dtype=torch.float64)

    def collate(self, items):
        return torch.stack([*items, torch.tensor([0, *drawn()], dtype=torch.float64)])


def batches(dataset, *, start: int = 0, stop: int, rank: int = 0, world_size: int = 1, disturb: bool = False):
    """The rank's items of the steps [start, stop), each with 4 items over all ranks. disturb: the program draws between batches."""
    share = Share(micro_batch=4 // world_size, rank=rank, world_size=world_size)
    stream = ItemStream(dataset, share=share, seed=3)
    if start:
        before = ItemStream(dataset, share=share, seed=3)
        for _ in range(start):
            before.next_batch()
        stream.load_state_dict(before.state_dict())
    found = []
    for _ in range(stop - start):
        if disturb:
            drawn()
        found.append(stream.next_batch().items)
    return torch.stack(found)


def test_draws_are_the_items_own():
    """At a resume, on several ranks, and where a model draws in between: every element has the same bits. Epochs differ."""
    for make in (Noisy, Stream):
        whole = batches(make(), stop=6)
        assert torch.equal(batches(make(), start=3, stop=6, disturb=True), whole[3:])
        assert len(whole[..., 1].unique()) == whole[..., 1].numel() or make is Noisy
        first, second = (batches(Noisy(), stop=6, rank=rank, world_size=2) for rank in range(2))
        assert torch.equal(torch.cat([first, second], dim=1), batches(Noisy(), stop=6))
    items = batches(Noisy(), stop=5).flatten(0, 1)
    once = items[items[:, 0] == 4]
    assert len(once) == 2 and not torch.equal(*once)  # one item in two epochs


def test_the_programs_own_draws_go_on():
    seed_generators("mine")
    expected = drawn() + drawn()
    seed_generators("mine")
    found = drawn()
    batches(Stream(), stop=2)
    held_out_items(Noisy(), share=Share(micro_batch=4), num_items=8, seed=3)
    assert found + drawn() == expected


def test_held_out_items_are_the_same_in_every_run():
    def found():
        share = Share(micro_batch=4)
        return torch.stack([batch.items for batch in held_out_items(Noisy(), share=share, num_items=8, seed=3)])

    assert torch.equal(found(), found())


def test_states_hold_all_generators():
    seed_generators("a")
    drawn()
    states = generator_states()
    assert all(value.dtype == torch.uint8 for value in states.values())
    expected = drawn()
    with kept_generators():
        drawn()
    seed_generators("b")
    set_generators(states)
    assert drawn() == expected
