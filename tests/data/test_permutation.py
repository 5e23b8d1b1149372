"""The computed shuffle is a bijection, differs by seed, and looks random."""

import pytest
import torch

from ztk.data.permutation import Permutation


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 255, 1000, 4097])
def test_bijection(size):
    permutation = Permutation(size, seed=(0, size))
    assert sorted(permutation[i] for i in range(size)) == list(range(size))


def test_seeds_differ_and_repeat():
    first, again, other = (Permutation(1000, seed=(seed,)) for seed in (1, 1, 2))
    row = [first[i] for i in range(1000)]
    assert row == [again[i] for i in range(1000)]
    same = sum(a == other[i] for i, a in enumerate(row))
    assert same < 10  # one in a thousand by chance


def test_no_memory_of_the_order():
    size = 20_000
    permutation = Permutation(size, seed=(5,))
    values = torch.tensor([permutation[i] for i in range(size)], dtype=torch.float64)
    index = torch.arange(size, dtype=torch.float64)
    correlations = (
        torch.corrcoef(torch.stack([index, values]))[0, 1],
        torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1],
    )
    assert max(abs(float(c)) for c in correlations) < 4 / size**0.5  # four standard deviations of independent values


def test_sizes_beyond_memory_cost_nothing():
    permutation = Permutation(10**12, seed=(0,))
    assert len({permutation[i] for i in range(1000)}) == 1000
