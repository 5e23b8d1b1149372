"""Gradients put off are the gradients, also with biases, shared weights and other kinds of layers between.

The same products are taken, but kernels may sum in another order when a matrix comes transposed: a few eps of the largest element.
"""

import pytest
import torch
from torch import Tensor, nn

from ztk.core.policies.model import LoraPolicy
from ztk.nn.deferred import DeferredGradients, finish
from ztk.nn.linear import Linear
from ztk.nn.lora import adapters_off, add_adapters


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.LayerNorm(8), Linear(8, 8)
        self.shared = Linear(8, 8)
        self.shared.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(torch.tanh(self.second(self.norm(self.first(x)))))


def check_close(found: Tensor, *, expected: Tensor) -> None:
    scale = expected.abs().max()
    torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=4 * torch.finfo(found.dtype).eps)


def build(dtype: torch.dtype) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def inputs(dtype: torch.dtype) -> Tensor:
    return torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_put_off_is_what_would_have_been(dtype):
    expected, x = build(dtype), inputs(dtype)
    expected(x).float().square().sum().backward()

    model, deferred, y = build(dtype), DeferredGradients(), inputs(dtype)
    deferred.attach(model)
    loss = model(y).float().square().sum()
    deferred.collecting = collected = []
    loss.backward()
    deferred.collecting = None
    check_close(y.grad, expected=x.grad)
    assert [parameter for parameter, _ in collected] == [model.shared.weight, model.shared.weight, model.first.weight]
    assert model.first.weight.grad is None
    assert torch.equal(
        model.first.bias.grad, expected.first.bias.grad
    )  # a sum over positions is no product: done at once
    finish(collected)
    assert collected == []
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        check_close(parameter.grad, expected=other.grad)


def test_nothing_is_put_off_unless_asked():
    expected, model, deferred = build(torch.float32), build(torch.float32), DeferredGradients()
    deferred.attach(model)
    for each in (expected, model):
        each(inputs(torch.float32)).sum().backward()
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        check_close(parameter.grad, expected=other.grad)
    with torch.no_grad():
        check_close(model(inputs(torch.float32)), expected=expected(inputs(torch.float32)))


def test_hooks_see_one_gradient_per_parameter():
    """ZeRO takes gradients over in these hooks, as a backward calls them."""
    model, deferred, seen = build(torch.float32), DeferredGradients(), []
    deferred.attach(model)
    model.second.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    loss = model(inputs(torch.float32)).sum()
    deferred.collecting = collected = []
    loss.backward()
    finish(collected)
    assert seen.count(True) == 1


def test_a_layer_with_an_adapter_keeps_it():
    """An adapter replaces the class's forward; deferring would lose its addition without an error."""
    model, plain = build(torch.float32), build(torch.float32)
    for each in (model, plain):
        add_adapters(each, policy=LoraPolicy(rank=2, alpha=4.0, targets=("first",)), base="")
        each.first.lora_A.to_empty(device="cpu").default.weight.data.fill_(0.1)
        each.first.lora_B.to_empty(device="cpu").default.weight.data.fill_(0.1)
    DeferredGradients().attach(model)
    assert torch.equal(model(inputs(torch.float32)), plain(inputs(torch.float32)))
    with adapters_off(plain):
        assert not torch.equal(model(inputs(torch.float32)), plain(inputs(torch.float32)))
