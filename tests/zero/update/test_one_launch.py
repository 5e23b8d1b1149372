"""One update for all segments of a piece gives the bits of one for each: their hyperparameters, positions and groups of 8-bit states."""

from unittest import mock

import pytest
import torch

from tests.zero.models import Layout, train
from ztk.core.policies.optimizer import OptimizerPolicy
from ztk.core.precision import PrecisionPolicy
from ztk.zero.update import piece_update

LEARNS = {"lr": 1e-2, "weight_decay": 0.1}
WIDE = PrecisionPolicy(dtype=torch.bfloat16, bf16_master=True, bf16_states=True)
CHOICES = {
    "adamw": {"optimizer": OptimizerPolicy(**LEARNS)},
    "adam": {"optimizer": OptimizerPolicy(name="adam", **LEARNS)},
    "lion": {"optimizer": OptimizerPolicy(name="lion", **LEARNS)},
    "sgd": {"optimizer": OptimizerPolicy(name="sgd", **LEARNS)},
    "sgd with momentum": {"optimizer": OptimizerPolicy(name="sgd", momentum=0.9, **LEARNS)},
    "bf16": {"optimizer": OptimizerPolicy(states="bf16", **LEARNS), "dtype": "bf16", "master": "fp32"},
    "stochastic": {"optimizer": OptimizerPolicy(states="bf16", **LEARNS), "dtype": "bf16", "master": "stochastic"},
    "8bit": {"optimizer": OptimizerPolicy(states="8bit", **LEARNS), "dtype": "bf16"},
    "bf16 master": {"optimizer": OptimizerPolicy(**LEARNS), "precision": WIDE},
}


def trained(process, *, on_device: bool, layout: Layout, **options) -> tuple[str, int]:
    """The bits of a run, and how many pieces one update has joined, where tensors lie as on a device, or on the host."""
    with (
        mock.patch.object(piece_update, "_is_on_device", lambda master: on_device),
        mock.patch.object(piece_update, "tiles_of", wraps=piece_update.tiles_of) as tables,
    ):
        return train(process, layout=layout, steps=4, **options).digest, tables.call_count


@pytest.mark.parametrize("options", CHOICES.values(), ids=CHOICES)
def test_one_update_of_all_segments_has_the_bits_of_one_for_each(ranks, options):
    """Buckets are so large that each has a matrix and a norm."""
    layout = Layout(stage=3, zero={"bucket_size": 10**6})
    apart = ranks(2).run(trained, on_device=False, layout=layout, **options)
    joined = ranks(2).run(trained, on_device=True, layout=layout, **options)
    assert [bits for bits, _ in joined] == [bits for bits, _ in apart]
    assert all(count == 0 for _, count in apart) and sum(count for _, count in joined) > 1
