"""Recomputed groups of layers that write into their input, as DeepSpeed's AlexNet does with `ReLU(inplace=True)`."""

import pytest
import torch
from torch import nn

from ztk.parallel.pipeline.module import PipelineModule


def add_one(x):
    return (x[0].add_(1.0), x[1]) if isinstance(x, tuple) else x.add_(1.0)


def make(*, interval: int) -> PipelineModule:
    torch.manual_seed(0)
    layers = [
        nn.Linear(4, 4),
        nn.ReLU(inplace=True),
        nn.Linear(4, 4),
        nn.Linear(4, 4),
        add_one,
        nn.ReLU(inplace=True),
        nn.Linear(4, 4),
    ]
    model = PipelineModule(layers)
    model.recompute_interval = interval
    return model


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_groups_that_begin_in_place_give_the_gradients_of_no_recomputation(interval):
    expected, found = make(interval=0), make(interval=interval)
    for step in range(2):  # the first run of a group detects it, later ones reuse the result
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        expected(x).square().sum().backward()
        found(x).square().sum().backward()
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter.grad, found.get_parameter(name).grad), name
