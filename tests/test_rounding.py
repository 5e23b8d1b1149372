"""The bounds of tests/rounding.py: wide enough for every correct way to round, narrow enough for small mistakes."""

import hashlib
import math

import pytest
import torch
from torch import Tensor

from tests.rounding import Bounds, rms

TOKENS, DIM = 40, 16


def attention(*, dtype: torch.dtype, length: int = TOKENS, mistake: str = "") -> dict[str, Tensor]:
    """Result and gradients of one head without a mask."""
    generator = torch.Generator().manual_seed(length)
    q, k, v, cotangent = (torch.randn(length, DIM, generator=generator).to(dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    scores = q @ k.T if mistake == "scale" else q @ k.T / math.sqrt(DIM)
    weights = scores.softmax(-1)
    values = v[:-1] if mistake == "term" else v
    out = weights[:, : len(values)] @ values
    out.backward(cotangent)
    if mistake == "element":
        q.grad[3, 5] *= 1 + 1e-3
    return {"out": out} | dict(zip(("d_q", "d_k", "d_v"), (leaf.grad for leaf in leaves), strict=True))


def bounds(*, length: int = TOKENS) -> Bounds:
    return Bounds(
        compute=lambda: attention(dtype=torch.float64, length=length), longest_sum=max(length, DIM), samples=10
    )


@pytest.mark.parametrize("length", [1, 2, TOKENS])
def test_fp32_is_within_the_bounds(length):
    limits = bounds(length=length)
    for name, value in attention(dtype=torch.float32, length=length).items():
        limits.check(name, value)
        limits.check_elements(name, value)


@pytest.mark.parametrize("mistake", ["scale", "term"])
def test_a_mistake_is_not(mistake):
    limits = bounds()
    for name, value in attention(dtype=torch.float64, mistake=mistake).items():
        with pytest.raises(AssertionError, match=name):
            limits.check(name, value)


def test_a_mistake_in_one_element_is_not():
    found = attention(dtype=torch.float64, mistake="element")["d_q"]
    with pytest.raises(AssertionError, match="d_q: 1 elements"):
        bounds().check_elements("d_q", found)


def test_a_bound_is_near_the_rounding_error():
    """Some units in the last place for results of common size; for one that is zero in exact arithmetic, of the terms that cancel."""
    eps = torch.finfo(torch.float32).eps
    limits = bounds()
    for name, exact in limits.exact.items():
        assert eps / 2 < limits.rms(name) / rms(exact) < 50 * eps, name
    alone = bounds(
        length=1
    )  # softmax over one score is 1 whatever the score: d_q is zero, from a difference of two products of size DIM
    assert alone.exact["d_q"].abs().max() == 0
    assert 0 < alone.rms("d_q") < 50 * eps * math.sqrt(DIM)


def test_in_place_operations_and_views_count_once():
    """x += x / 3 and its kin: the error of each, none from a view; integers and the inputs themselves stay as they are."""
    x = torch.linspace(1, 2, 101, dtype=torch.float64)

    def compute() -> dict[str, Tensor]:
        y = x.clone()
        return {"view": y.view(-1)[::2], "sum": x.clone().add_(x.view(-1) / 3), "count": torch.arange(3).double()}

    before = x.clone()
    limits = Bounds(compute=compute, longest_sum=1)
    assert torch.equal(x, before)
    assert limits.rms("view") == limits.rms("count") == 0 < limits.rms("sum") < 4 * torch.finfo(torch.float32).eps


def processor(process) -> tuple[str, str]:
    """torch's chosen instructions, and the bits of results of BLAS and torch's loops."""
    x = torch.linspace(-1, 1, 48 * 200).view(48, 200)
    bits = torch.cat([x @ x.T, (x.to(torch.bfloat16) @ x.to(torch.bfloat16).T).float(), x.softmax(-1)], dim=1)
    return torch.backends.cpu.get_cpu_capability(), hashlib.sha256(bits.numpy().tobytes()).hexdigest()


def test_ranks_compute_as_this_process(ranks):
    """The environment that stands for another processor reaches every rank."""
    assert ranks(2).run(processor) == [processor(None)] * 2
