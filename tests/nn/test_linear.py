"""The CPU routes of a linear layer against float64."""

import pytest
import torch

from ztk.nn.linear import HAS_ONEDNN, Linear, _LinearByOneDNN, linear


@pytest.mark.parametrize("route", [lambda x, w: linear(x, weight=w), _LinearByOneDNN.apply])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 3), (5, 33), (2, 7, 16), (2, 3, 5, 64)])
def test_product_and_gradients(route, dtype, shape):
    if not HAS_ONEDNN:
        pytest.skip("this torch has no oneDNN")
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(24, shape[-1], generator=generator).to(dtype).requires_grad_()
    out = route(x, weight)
    d_out = torch.randn(out.shape, generator=generator).to(dtype)
    got = (out, *torch.autograd.grad(out, (x, weight), d_out))
    wide_x, wide_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = wide_x @ wide_weight.T
    wanted = (expected, *torch.autograd.grad(expected, (wide_x, wide_weight), d_out.double()))
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == dtype
        assert a.shape == b.shape
        # one rounding of each element, and of each of up to 64 float32 additions
        assert (a.double() - b).abs().max() <= (torch.finfo(dtype).eps + 64 * 2**-24) * max(1.0, b.abs().max())


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_frozen_inputs_get_no_gradient(frozen):
    x = torch.randn(4, 8, requires_grad=frozen != "x")
    weight = torch.randn(6, 8, requires_grad=frozen != "weight")
    linear(x, weight=weight).sum().backward()
    assert (x.grad is None) == (frozen == "x")
    assert (weight.grad is None) == (frozen == "weight")


def test_no_rows():
    x = torch.empty(0, 8, requires_grad=True)
    weight = torch.ones(4, 8, requires_grad=True)
    linear(x, weight=weight).sum().backward()
    assert x.grad.shape == (0, 8)
    assert not weight.grad.any()


def test_non_contiguous_inputs():
    x, weight = torch.randn(9, 5).t(), torch.randn(9, 7).t()
    torch.testing.assert_close(linear(x, weight=weight), x.contiguous() @ weight.contiguous().t())


def test_float64_and_meta_go_through_torch():
    layer = Linear(6, 4).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))
    assert Linear(6, 4).to("meta")(torch.empty(2, 6, device="meta")).shape == (2, 4)
    assert layer.bias is None
