"""SGD without momentum for one group among others that have some: its buffer is there and is not used."""

import pytest
import torch

from ztk.kernels import CONTROL_COLUMNS, Control, set_backend, sgd


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("backend", ["auto", "triton", "reference"])
def test_a_group_with_momentum_zero(backend, nesterov):
    set_backend(backend)
    control = torch.zeros(CONTROL_COLUMNS)
    control[Control.lr], control[Control.grad_coefficient] = 0.5, 1.0
    master, grad = torch.ones(48), torch.arange(48.0)
    sgd(master, grad=grad, momentum_buffer=torch.zeros(48), control=control, nesterov=nesterov)
    assert torch.equal(master, 1.0 - 0.5 * torch.arange(48.0))
