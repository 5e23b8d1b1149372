"""The CPU routes of a linear layer against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ztk.nn.linear import HAS_ONEDNN, Linear, _LinearByOneDNN, linear, speed_up_linear_layers


@pytest.mark.parametrize("route", [lambda x, w, b: linear(x, weight=w, bias=b), _LinearByOneDNN.apply])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 3), (5, 33), (2, 7, 16), (2, 3, 5, 64), (40,)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_product_and_gradients(route, dtype, shape, has_bias):
    """The weight has 24 rows: in some shapes its gradient is computed transposed."""
    if not HAS_ONEDNN:
        pytest.skip("this torch has no oneDNN")
    generator = torch.Generator().manual_seed(sum(shape))
    x, weight, bias = (
        torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in (shape, (24, shape[-1]), (24,))
    )
    inputs = (x, weight, bias) if has_bias else (x, weight)
    out = route(x, weight, bias if has_bias else None)
    d_out = torch.randn(out.shape, generator=generator).to(dtype)
    got = (out, *torch.autograd.grad(out, inputs, d_out))
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = F.linear(*wide)
    wanted = (expected, *torch.autograd.grad(expected, wide, d_out.double()))
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
    assert torch.equal(layer(x), F.linear(x, layer.weight))
    assert Linear(6, 4).to("meta")(torch.empty(2, 6, device="meta")).shape == (2, 4)
    assert layer.bias is None


def test_second_derivatives():
    """oneDNN's product has no gradient: a backward that is differentiated must not go through it."""
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)

    def second(product):
        (first,) = torch.autograd.grad(product(x, weight).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), (x, weight))

    for a, b in zip(second(lambda x, w: linear(x, weight=w)), second(F.linear), strict=True):
        assert b.any()
        # three products in a row, and sums of up to 12 of their powers, which cancel
        assert (a - b).abs().max() <= 64 * 2**-24 * b.abs().max()


def test_transforms_of_functions_and_tensor_subclasses_see_torchs_own_product():
    x, weight = torch.randn(5, 4), torch.randn(3, 4)
    each = torch.func.vmap(lambda row: linear(row, weight=weight))(x)
    torch.testing.assert_close(each, F.linear(x, weight))
    gradient = torch.func.grad(lambda x: linear(x, weight=weight).sum())(x)
    torch.testing.assert_close(gradient, weight.sum(0).expand(5, 4))
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    linear(x.as_subclass(Watched), weight=weight)
    assert F.linear in seen


@pytest.mark.parametrize("x", [torch.ones(2, 5), torch.ones(2, 4, dtype=torch.float64), torch.ones(2, 4).bfloat16()])
def test_what_torch_refuses_is_refused(x):
    with pytest.raises(RuntimeError) as refused:
        F.linear(x, torch.ones(3, 4))
    with pytest.raises(RuntimeError) as ours:
        linear(x, weight=torch.ones(3, 4))
    assert str(ours.value) == str(refused.value)


def test_speeding_up_takes_torchs_own_layers_only():
    class Special(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model = nn.Sequential(nn.Linear(6, 5), Special(5, 4), nn.Sequential(nn.Linear(4, 3, bias=False)))
    names, x = list(model.state_dict()), torch.randn(2, 6)
    before = model(x)
    speed_up_linear_layers(model)
    assert [type(model[0]), type(model[1]), type(model[2][0])] == [Linear, Special, Linear]
    assert list(model.state_dict()) == names
    assert isinstance(model[0], nn.Linear)
    torch.testing.assert_close(model(x), before)
