"""Gradients through linear functions, and gradients of gradients."""

import torch
from torch.autograd import grad

from ztk.core.runtime.differentiable import through


def test_first_and_second_derivatives_of_a_linear_function():
    matrix = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
    used = []

    def forward(x):
        used.append("forward")
        return (matrix @ x).detach()

    def backward(d_out):
        used.append("backward")
        return (matrix.T @ d_out).detach()

    loss = through(x, forward=forward, backward=backward).pow(3).sum()
    (first,) = grad(loss, x, create_graph=True)
    (second,) = grad(first.pow(2).sum(), x)

    plain = x.detach().clone().requires_grad_()
    (plain_first,) = grad((matrix @ plain).pow(3).sum(), plain, create_graph=True)
    (plain_second,) = grad(plain_first.pow(2).sum(), plain)
    torch.testing.assert_close(first, plain_first)
    torch.testing.assert_close(second, plain_second)
    assert used == ["forward", "backward", "forward", "backward"]
