"""A few of the random models and strategies of `random_layouts`; `python -m tests.zero.random_layouts` draws as many as there is time for."""

import random

import pytest
import torch

from tests.zero import random_layouts
from tests.zero.models import Layout


@pytest.mark.parametrize("seed", range(12))
def test_bits_equal_stage_0(ranks, seed):
    assert not random_layouts.failures(seed, pool=ranks(2))


def test_a_difference_is_seen(ranks, monkeypatch):
    """Strategies that do change the numbers: gradients in 4 bits."""
    inexact = random_layouts.Strategy(layout=Layout(stage=2, zero={"quantized_gradients": True}))
    monkeypatch.setattr(random_layouts, "draw_strategy", lambda chance, drawn: inexact)
    found = random_layouts.failures(0, pool=ranks(2), draws=1)
    assert len(found) == 1 and "seed 0" in found[0]


def test_what_is_drawn_can_be_built():
    """Every kind of block comes in the tested seeds, and every model learns in the plain."""
    kinds = set()
    for seed in range(12):
        drawn = random_layouts.draw(random.Random(seed))
        kinds |= {kind for _, kind in drawn.blocks}
        model = random_layouts.Model(drawn)
        tokens = torch.zeros(3, 7, dtype=torch.long)
        model(tokens, number=1).backward()
        assert any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    assert kinds == set(random_layouts.KINDS)
