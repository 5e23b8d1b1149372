"""Inputs are copied to main memory and back on a stream of their own. `pytest -m gpu tests/parallel/recompute`."""

import gc

import pytest
import torch

from tests.parallel.recompute.models import WIDTH, Residual, build
from ztk.parallel.recompute import RecomputePolicy, recompute_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ROWS = 1 << 16  # an input of 4 MiB, so that copies take longer than launches


def train(model: Residual) -> list[float]:
    """Losses and sums of gradients of three steps."""
    found = []
    torch.manual_seed(1)
    for step in range(3):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()
        loss = model(x)
        loss.backward()
        found.append(loss.item())
        for parameter in model.parameters():
            found.append(parameter.grad.double().sum().item())
            parameter.grad = None
    return found


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("inputs_on_cpu", [False, True])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_every_bit_is_as_without(mode, inputs_on_cpu, contiguous):
    model = build().cuda()
    recompute_blocks(model, policy=RecomputePolicy(mode=mode, inputs_on_cpu=inputs_on_cpu, contiguous=contiguous))
    assert train(model) == train(build().cuda())


def test_inputs_in_main_memory_leave_the_gpu():
    """After a forward the GPU holds no block's input; one comes back at a time, and one ahead."""

    def held(policy: RecomputePolicy) -> int:
        gc.collect()  # tensors in cycles of the call before would leave the GPU during this one
        model = build().cuda()
        recompute_blocks(model, policy=policy)
        x = torch.randn(ROWS, WIDTH, device="cuda")
        before = torch.cuda.memory_allocated()
        loss = model(x)
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
        return kept

    held(RecomputePolicy(mode="full"))  # the libraries' workspaces stay
    on_device = held(RecomputePolicy(mode="full"))
    on_host = held(RecomputePolicy(mode="full", inputs_on_cpu=True))
    assert on_device - on_host == 4 * ROWS * WIDTH * 4  # four inputs
