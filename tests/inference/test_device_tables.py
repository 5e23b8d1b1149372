"""Tables on a device follow those in main memory, and few entries are sent."""

import random

import torch

from tests.device_tagged import gpu_tensors
from ztk.inference.cache import DeviceTables


def check_rows(made: DeviceTables, *, tables: list[list[int]], slots: list[int]) -> None:
    for slot in slots:
        assert made.tensor[slot, : len(tables[slot])].tolist() == tables[slot]


def test_tables_follow_any_change():
    """Sequences that grow, shrink, change places, move to other blocks, and end; steps of some of them."""
    rng = random.Random(0)
    with gpu_tensors():
        tables: list[list[int]] = [[] for _ in range(8)]
        made = DeviceTables(tables, width=16, device=torch.device("cuda"))
        for _ in range(200):
            slot = rng.randrange(8)
            match rng.randrange(4):
                case 0:
                    tables[slot] = [rng.randrange(1, 99) for _ in range(rng.randrange(17))]
                case 1 if tables[slot]:
                    tables[slot][rng.randrange(len(tables[slot])) :] = [rng.randrange(1, 99)]
                case 2:
                    rng.shuffle(tables)
                case _:
                    for own in tables:
                        own += [rng.randrange(1, 99)] * (len(own) < 16)
            slots = rng.sample(range(8), rng.randrange(1, 9))
            made.update(slots)
            assert made.tensor.is_cuda
            check_rows(made, tables=tables, slots=slots)


def test_a_step_that_continues_sends_its_new_blocks():
    tables = [[row + 1] * 511 for row in range(60)]
    made = DeviceTables(tables, width=512, device=torch.device("cpu"))
    assert made.update(range(60)) == 60 * 511
    assert made.update(range(60)) == 0
    tables[7].append(3)
    tables[9][2] = 5  # another block in the middle: the row is sent
    assert made.update([7, 9]) == 1 + 511
    check_rows(made, tables=tables, slots=list(range(60)))
