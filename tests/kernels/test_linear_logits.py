"""Losses of logits in chunks: values and gradients of the loss over all logits."""

import pytest
import torch

from ztk.kernels import linear_logit_loss, logit_loss

CHUNK = 3 * 7 * 4  # bytes: three rows of a vocabulary of seven


def parts():
    drawn = torch.Generator().manual_seed(0)
    return torch.randn(8, 5, generator=drawn).requires_grad_(), torch.randn(7, 5, generator=drawn).requires_grad_()


def squared(calls: list[slice]):
    """A loss that is no function of one token's probability."""
    factors = torch.arange(1.0, 9.0)

    def loss_of(logits, cut):
        calls.append(cut)
        return (torch.softmax(logits, -1).square().sum(-1) * factors[cut]).sum()

    return loss_of


def in_chunks(x, weight, loss_of):
    return linear_logit_loss(x, weight, loss_of=loss_of, chunk_bytes=CHUNK)


def of_logits(x, weight, loss_of):
    return logit_loss(x @ weight.T, loss_of=loss_of, chunk_bytes=CHUNK)


@pytest.mark.parametrize("by", [in_chunks, of_logits])
def test_values_and_gradients_equal_full_logits(by):
    x, weight = parts()
    expected = squared([])(x @ weight.T, slice(0, 8))
    gradients = torch.autograd.grad(2 * expected, (x, weight))
    calls: list[slice] = []
    found = by(x, weight, squared(calls))
    assert [(cut.start, cut.stop) for cut in calls] == [(0, 3), (3, 6), (6, 9)]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(2 * found, (x, weight)), gradients)
    with torch.no_grad():
        torch.testing.assert_close(by(x, weight, squared([])), expected)


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"x \(8, 5\) .* and weight \(5, 7\)"):
        linear_logit_loss(torch.zeros(8, 5), torch.zeros(5, 7), loss_of=squared([]))
