"""Tests of layer_norm beyond the generic ones: large means, determinism over the grid, and refusals."""

import pytest
import torch

from ztk.kernels import set_backend
from ztk.kernels.launch.grids import resident_programs
from ztk.kernels.launch.machine import INTERPRETER
from ztk.kernels.ops.layer_norm import LaunchConfig, layer_norm, layer_norm_reference


@pytest.fixture(params=["triton", "auto"])
def backend(request):
    set_backend(request.param)
    yield request.param
    set_backend("auto")


def test_large_mean_cancels_nothing(backend):
    x = (torch.randn(4, 96) + 4096).requires_grad_()
    weight, bias = torch.ones(96), torch.zeros(96)
    out = layer_norm(x, weight, bias)
    expected = layer_norm_reference(x.detach().double(), weight, bias)
    assert (out - expected).abs().max() < 2e-3


def test_only_one_of_two_outputs_used(backend):
    """The gradient of an unused output is absent or zero, not poison."""
    x, residual = torch.randn(3, 33, requires_grad=True), torch.randn(3, 33, requires_grad=True)
    weight = torch.ones(33, requires_grad=True)
    _, summed = layer_norm(x, weight, residual=residual)
    summed.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x)) and torch.equal(weight.grad, torch.zeros(33))


def test_partial_sums_cover_every_row():
    """More rows than programs times rows per program, and a number that does not divide."""
    rows = (
        3
        * resident_programs(INTERPRETER, num_warps=4, registers=64)
        * LaunchConfig.for_features(130, warp_size=32).block_m
        + 1
    )
    x, d_out = torch.randn(rows, 130), torch.randn(rows, 130)
    weight = torch.randn(130, requires_grad=True)
    bias = torch.randn(130, requires_grad=True)
    set_backend("triton")
    layer_norm(x, weight, bias).backward(d_out)
    first = weight.grad.clone()
    weight.grad = bias.grad = None
    layer_norm(x, weight, bias).backward(d_out)
    set_backend("auto")
    assert torch.equal(weight.grad, first), "the same input must give the same bits"
    assert torch.allclose(bias.grad, d_out.sum(0), atol=1e-4)


@pytest.mark.parametrize("warp_size", [32, 64])
@pytest.mark.parametrize("N", [1, 100, 1024, 4096, 16384])
def test_launch_fits_the_machine(N, warp_size):
    config = LaunchConfig.for_features(N, warp_size=warp_size)
    threads = config.num_warps * warp_size
    assert threads <= 1024 and config.block_n >= N
    assert config.block_m * config.block_n >= 8 * threads, "a thread needs eight elements for a 16-byte access"


def test_refuses_unsupported_arguments():
    with pytest.raises(ValueError, match="weight"):
        layer_norm(torch.zeros(2, 4), torch.ones(5))
    with pytest.raises(ValueError, match="residual"):
        layer_norm(torch.zeros(2, 4), torch.ones(4), residual=torch.zeros(2, 4, dtype=torch.float16))
