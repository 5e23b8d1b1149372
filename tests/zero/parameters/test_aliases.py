"""Tensors that share memory with a parameter are refused by name; tensors that only look alike are accepted."""

import pytest
import torch
from torch import nn

from ztk.zero.parameters.aliases import check_aliases


def _two() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))


def _tied_by_data() -> nn.Module:
    model = _two()
    model[1].weight.data = model[0].weight.data
    return model


def _transposed() -> nn.Module:
    model = _two()
    model[1].weight = nn.Parameter(model[0].weight.data.t())
    return model


def _attribute() -> nn.Module:
    model = _two()
    model.first_row = model[0].weight[0]
    return model


def _buffer() -> nn.Module:
    model = _two()
    model.register_buffer("kept", model[1].weight.detach())
    return model


def _in_a_list() -> nn.Module:
    model = _two()
    model.all = [model[1].weight.data]
    return model


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (_tied_by_data, "0.weight and 1.weight share memory"),
        (_transposed, "0.weight and 1.weight share memory"),
        (_attribute, "first_row is a view of parameter 0.weight"),
        (_buffer, "kept is a view of parameter 1.weight"),
        (_in_a_list, "all is a view of parameter 1.weight"),
    ],
)
def test_shared_memory_is_refused(make, part):
    with pytest.raises(ValueError, match=part):
        check_aliases(make())


def _columns() -> nn.Module:
    model, both = _two(), torch.randn(4, 8)
    model[0].weight, model[1].weight = nn.Parameter(both[:, ::2]), nn.Parameter(both[:, 1::2])
    return model


def _halves() -> nn.Module:
    model, both = _two(), torch.randn(8, 4)
    model[0].weight, model[1].weight = nn.Parameter(both[:4]), nn.Parameter(both[4:])
    return model


def _tied() -> nn.Module:
    model = _two()
    model[1].weight = model[0].weight
    return model


def _frozen() -> nn.Module:
    return _tied_by_data().requires_grad_(False)


@pytest.mark.parametrize(
    "make",
    [
        *(_columns, _halves, _tied, _frozen),
        lambda: nn.LSTM(4, 4, num_layers=2),
        lambda: torch.nn.utils.spectral_norm(nn.Linear(4, 4)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    ],
)
def test_what_shares_no_element_passes(make):
    check_aliases(make())
