"""Tables on a device follow those in main memory, and few entries are sent."""

import random

import torch

from tests.device_tagged import gpu_tensors
from ztk.inference.device_tables import DeviceTables


def padded(tables: list[list[int]], *, rows: int, width: int) -> list[list[int]]:
    return [own + [0] * (width - len(own)) for own in [*tables, *[[]] * (rows - len(tables))]]


def test_tables_follow_any_change():
    """Sequences that grow, shrink, change places, move to other blocks, and end."""
    rng = random.Random(0)
    with gpu_tensors():
        made, tables = DeviceTables(rows=8, width=16, device=torch.device("cuda")), []
        for _ in range(200):
            match rng.randrange(6):
                case 0:
                    tables = [
                        [rng.randrange(1, 99) for _ in range(rng.randrange(1, 17))] for _ in range(rng.randrange(1, 9))
                    ]
                case 1 if tables:
                    tables.pop(rng.randrange(len(tables)))
                case 2 if tables:
                    own = tables[rng.randrange(len(tables))]
                    own[rng.randrange(len(own)) :] = [rng.randrange(1, 99)]
                case 3:
                    rng.shuffle(tables)
                case _:
                    for own in tables:
                        own += [rng.randrange(1, 99)] * (len(own) < 16)
            made.update(tables)
            assert made.tensor.is_cuda and made.tensor.tolist() == padded(tables, rows=8, width=16)


def test_a_step_that_continues_sends_its_new_blocks():
    made = DeviceTables(rows=64, width=512, device=torch.device("cpu"))
    tables = [[row + 1] * 511 for row in range(60)]
    assert made.update(tables) == 64 * 512
    assert made.update(tables) == 0
    tables[7].append(3)
    tables[9][2] = 5  # another block in the middle: the row is sent
    assert made.update(tables) == 1 + 511
    assert made.tensor.tolist() == padded(tables, rows=64, width=512)
