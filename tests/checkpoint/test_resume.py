"""A resumed run is the uninterrupted run, to the bit."""

from dataclasses import replace

import pytest

from tests.checkpoint.runs import Setup, resume, train_and_save
from tests.zero.models import DTYPES, Layout

LAYOUTS = [Layout(stage=stage, offload=offload) for stage in range(4) for offload in ("none", "cpu", "nvme")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.id)
def test_losses_and_weights_have_the_same_bits(ranks, tmp_path, layout, dtype):
    setup = Setup(layout=layout, dtype=dtype)
    straight = ranks(2).run(train_and_save, setup=setup, folder=str(tmp_path), save_at=4, stop=8)
    resumed = ranks(2).run(resume, setup=replace(setup, seed=1), folder=str(tmp_path), stop=8)
    assert resumed == straight


@pytest.mark.parametrize("optimizer", ["sgd"])
def test_other_optimizers_and_accumulation(ranks, tmp_path, optimizer):
    setup = Setup(layout=Layout(stage=2), optimizer=optimizer, accumulation_steps=2)
    straight = ranks(2).run(train_and_save, setup=setup, folder=str(tmp_path), save_at=3, stop=5)
    assert ranks(2).run(resume, setup=setup, folder=str(tmp_path), stop=5) == straight


def test_frozen_parameters(ranks, tmp_path):
    setup = Setup(layout=Layout(stage=3), dtype="bf16", frozen=("embedding.weight", "blocks.1.up.weight"))
    straight = ranks(2).run(train_and_save, setup=setup, folder=str(tmp_path), save_at=3, stop=5)
    assert ranks(2).run(resume, setup=setup, folder=str(tmp_path), stop=5) == straight
