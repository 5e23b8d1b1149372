"""The sum over ranks of a shared input's gradient overlaps with the last layer's weight gradient and does not change it."""

import gc
import weakref
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ztk.nn import linear as products
from ztk.nn.linear import Linear, linear
from ztk.parallel.recompute import selective
from ztk.parallel.tensor.collectives import sum_out
from ztk.parallel.tensor.layers import TensorAxis, cut_column, cut_row

RANKS, WIDTH, TOKENS = 2, 16, 6


class Twins:
    """A world of two ranks that hold the same: a sum is twice the value."""

    size, rank = RANKS, 0

    def __init__(self) -> None:
        self.events: list[str] = []

    def all_reduce(self, full: Tensor, *, label: str, in_shard_order: bool = True) -> "Twins":
        assert full.is_contiguous() and full.dim() == 1
        self.events.append("start")
        full.mul_(RANKS)
        return self

    def reduce_scatter(self, full: Tensor, *, out: Tensor, label: str) -> "Twins":
        self.events.append("start")
        out.copy_(RANKS * full.view(RANKS, -1)[self.rank])
        return self

    def gather(self, x: Tensor, *, label: str) -> Tensor:
        self.events.append("wait")
        return torch.stack([x.detach()] * RANKS)

    def wait(self) -> None:
        self.events.append("wait")


class Block(nn.Module):
    """Three layers of one input, of which `used` reach the result."""

    def __init__(self, axis: TensorAxis, *, used: int = 3, adapter: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.columns = nn.ModuleList(Linear(WIDTH, WIDTH) for _ in range(3))
        self.row = Linear(WIDTH, WIDTH)
        self.used, self.adapter = used, adapter
        if adapter:  # it reads the same input
            first = self.columns[0]
            first.forward = lambda x: Linear.forward(first, x) + 0.5 * x
        for place, column in enumerate(self.columns):
            cut_column(column, axis=axis, name=f"column {place}")
        cut_row(self.row, axis=axis, name="row")

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0  # as a norm's result, which nothing but the layers holds
        outs = [column(x) for column in self.columns]
        return self.row(torch.stack(outs[: self.used]).prod(0)) + x


@pytest.fixture
def weight_products() -> Iterator[list[list[str]]]:
    """Yields lists; every product for a weight's gradient appends a word."""
    watching: list[list[str]] = []
    product = products.weight_gradient

    def noted(*args, **kwargs) -> Tensor:
        for events in watching:
            events.append("weight")
        return product(*args, **kwargs)

    with mock.patch.object(products, "weight_gradient", noted):
        yield watching


def gradients(block: Block, *, run=None) -> list[Tensor]:
    """Of the input [B, T, WIDTH] and of all weights."""
    x = torch.linspace(-1, 1, TOKENS * WIDTH).view(1, TOKENS, WIDTH).requires_grad_()
    (run or block)(x).square().sum().backward()
    return [x.grad] + [weight.grad for weight in block.parameters()]


class _SummedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, d_out: Tensor) -> Tensor:
        return RANKS * d_out


class _SummedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return RANKS * x

    @staticmethod
    def backward(ctx, d_out: Tensor) -> Tensor:
        return 1 * d_out


def plain(block: Block, x: Tensor) -> Tensor:
    """`block(x)` of two ranks that hold the same, by autograd alone."""
    x = x * 1.0
    entered = _SummedBackward.apply(x)
    outs = []
    for column in block.columns:
        out = linear(entered, weight=column.weight)
        outs.append(out + 0.5 * entered if block.adapter and not outs else out)
    return _SummedForward.apply(linear(torch.stack(outs[: block.used]).prod(0), weight=block.row.weight)) + x


def without_overlap(**options) -> list[Tensor]:
    block = Block(axis_of(Twins()), **options)
    return gradients(block, run=lambda x: plain(block, x))


def axis_of(comm: Twins, *, sequence: bool = False) -> TensorAxis:
    axis = TensorAxis(comm, sequence=sequence)
    axis.begin(TOKENS)
    return axis


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


@pytest.mark.parametrize("sequence", [False, True], ids=["copied", "cut sequence"])
def test_the_sum_overlaps_with_the_last_weight_gradient(weight_products, sequence):
    comm = Twins()
    block = Block(axis_of(comm, sequence=sequence))
    x = torch.linspace(-1, 1, TOKENS * WIDTH).view(1, TOKENS, WIDTH).requires_grad_()
    out = block(x).square().sum()
    comm.events.clear()
    weight_products.append(comm.events)
    out.backward()
    tail = comm.events[-5:]
    assert tail == ["weight", "weight", "start", "weight", "wait"], comm.events


@pytest.mark.parametrize(
    "options", [{}, {"used": 2}, {"adapter": True}], ids=["all", "one without a gradient", "an adapter on one"]
)
def test_gradients_have_the_bits_of_those_without_overlap(options):
    assert_same(gradients(Block(axis_of(Twins()), **options)), without_overlap(**options))


def test_an_input_that_does_not_divide_is_summed_by_a_copy():
    comm = Twins()
    comm.size = 5  # 96 elements
    assert_same(gradients(Block(axis_of(comm))), without_overlap())


@pytest.mark.parametrize("contexts", [None, selective.contexts], ids=["full", "selective"])
def test_recomputed_blocks_have_the_same_gradients(contexts):
    """Selective recomputation keeps the results of products. An in-place sum over them would be repeated."""
    block = Block(axis_of(Twins()))
    options = {} if contexts is None else {"context_fn": contexts}
    found = gradients(block, run=lambda x: checkpoint(block, x, use_reentrant=False, **options))
    assert_same(found, without_overlap())


def test_second_derivatives():
    def second(run) -> Tensor:
        x = torch.linspace(-1, 1, TOKENS * WIDTH).view(1, TOKENS, WIDTH).requires_grad_()
        (first,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        return first

    block = Block(axis_of(Twins()))
    assert torch.equal(second(block), second(lambda x: plain(block, x)))
    assert second(block).requires_grad


def test_a_second_derivative_through_a_sum_in_place_leaves_its_tensors_unchanged():
    x, slope = torch.ones(WIDTH, requires_grad=True), torch.ones(WIDTH, requires_grad=True)
    total = sum_out(x * 1.0, comm=Twins(), label="sum", in_place=True)
    (first,) = torch.autograd.grad(total, x, slope, create_graph=True)
    varied = torch.ones(WIDTH)
    (second,) = torch.autograd.grad(first, slope, varied)
    assert torch.equal(second, torch.full((WIDTH,), float(RANKS))) and torch.equal(varied, torch.ones(WIDTH))


def test_a_backward_of_one_part_and_one_of_the_rest():
    x = torch.linspace(-1, 1, TOKENS * WIDTH).view(1, TOKENS, WIDTH).requires_grad_()
    block = Block(axis_of(Twins()))
    shared = x * 1.0
    first, second = (column(shared).square().sum() for column in block.columns[:2])
    first.backward(retain_graph=True)
    second.backward()
    wanted = torch.zeros_like(x)
    for column in block.columns[:2]:
        with torch.no_grad():
            wanted += RANKS * linear(2 * linear(x, weight=column.weight), weight=column.weight.t())
    assert torch.allclose(x.grad, wanted, rtol=1e-6, atol=1e-6)  # two roundings


@pytest.mark.parametrize("backward", [False, True])
def test_nothing_of_a_forward_stays(backward):
    axis = axis_of(Twins())
    block = Block(axis)
    x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    with mock.patch.object(TensorAxis, "_forget"):
        out = block(x)
        entered = weakref.ref(axis._shared.entered)
    axis._shared = None
    if backward:
        out.square().sum().backward()
    del out
    gc.collect()
    assert entered() is None
