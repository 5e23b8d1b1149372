"""The all-to-all of rows on one rank: work between start and wait, in both directions."""

import pytest
import torch

from ztk.core.runtime import Comm
from ztk.core.runtime.comm.transport import SingleRankTransport
from ztk.kernels import moe_slots
from ztk.parallel.moe.all_to_all import AsyncAllToAll
from ztk.parallel.moe.exchange import gather_rows

SINGLE_RANK = Comm(SingleRankTransport(), rank=0, size=1, device=torch.device("cpu"))


class Logged(torch.autograd.Function):
    """Work that records when it runs."""

    @staticmethod
    def forward(ctx, x, log, name):
        ctx.log, ctx.name = log, name
        log.append(name)
        return x * 2

    @staticmethod
    def backward(ctx, d_out):
        ctx.log.append(f"{ctx.name} back")
        return d_out * 2, None, None


@pytest.fixture
def log(monkeypatch) -> list[str]:
    events: list[str] = []

    def telling(name: str, say: str):
        method = getattr(AsyncAllToAll, name)
        monkeypatch.setattr(AsyncAllToAll, name, lambda self, *a: (events.append(say), method(self, *a))[1])

    telling("start_forward", "started")
    telling("wait_forward", "waited for")
    return events


def test_what_stands_between_also_runs_between_in_the_backward(log):
    """The layer's order: rows are sent, the shared expert runs, they arrive, experts run, results come back, both are added."""
    x = torch.randn(6, 3, requires_grad=True)
    to_experts, from_experts = (
        AsyncAllToAll(SINGLE_RANK, send=[6], receive=[6], label=label) for label in ("to experts", "from experts")
    )
    buffer = to_experts.start(x)
    shared = Logged.apply(x, log, "shared")
    arrived = to_experts.wait(buffer)
    results = from_experts.wait(from_experts.start(Logged.apply(arrived, log, "experts")))
    out = results + shared
    assert log == ["started", "shared", "waited for", "experts", "started", "waited for"]
    log.clear()
    out.sum().backward()
    assert log == ["started", "waited for", "experts back", "started", "shared back", "waited for"]
    torch.testing.assert_close(x.grad, torch.full_like(x, 4.0))


def test_rows_that_depend_on_nothing_still_take_part_in_the_backward(log):
    """A rank without tokens computes nothing; its peers must not wait for it."""
    anchor = torch.randn(2, 3, requires_grad=True) * 1
    exchange = AsyncAllToAll(SINGLE_RANK, send=[2], receive=[2], label="from experts")
    arrived = exchange.wait(exchange.start(torch.zeros(2, 3), anchor=anchor))
    log.clear()
    arrived.sum().backward()
    assert log == ["started", "waited for"]


@pytest.mark.parametrize("k", [1, 3])
def test_slots_sort_by_expert_and_rows_come_back_to_their_tokens(k):
    """Compared with a loop. The gradient of a row is the sum over its slots."""
    generator = torch.Generator().manual_seed(k)
    experts = torch.stack([torch.randperm(5, generator=generator)[:k] for _ in range(7)])
    slots = moe_slots(experts, num_experts=5)
    wanted = sorted((int(experts[t, j]), t * k + j) for t in range(7) for j in range(k))
    assert slots.order.tolist() == [assignment for _, assignment in wanted]
    assert slots.offsets.diff().tolist() == torch.bincount(experts.flatten(), minlength=5).tolist()
    assert [slots.order[p] for p in slots.position.flatten()] == list(range(7 * k))

    x = torch.randn(7, 4, requires_grad=True, generator=generator)
    rows = gather_rows(x, order=slots.order, position=slots.position)
    assert torch.equal(rows, torch.stack([x[assignment // k] for _, assignment in wanted]))
    d_rows = torch.randn(7 * k, 4, generator=generator)
    rows.backward(d_rows)
    expected = torch.zeros(7, 4).index_add_(0, torch.tensor([a // k for _, a in wanted]), d_rows)
    torch.testing.assert_close(x.grad, expected)
