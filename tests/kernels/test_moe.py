"""Routing invariants, planted skews, and a full mixture-of-experts layer against its dense form."""

import pytest
import torch

from ztk.kernels import set_backend
from ztk.kernels.ops.grouped_gemm import grouped_matmul
from ztk.kernels.ops.moe_combine import moe_combine
from ztk.kernels.ops.moe_routing import moe_route, moe_slots


@pytest.fixture(params=["triton", "auto"])
def backend(request):
    set_backend(request.param)
    yield request.param
    set_backend("auto")


def check_routing(routing, *, T, E, k):
    assert routing.offsets[0] == 0 and routing.offsets[-1] == T * k
    assert torch.equal(routing.offsets.diff(), routing.counts)
    assert torch.equal(routing.order.sort().values, torch.arange(T * k, dtype=torch.int32)), "every assignment once"
    assert torch.equal(routing.position.flatten()[routing.order], torch.arange(T * k, dtype=torch.int32))
    by_slot = routing.experts.flatten()[routing.order]
    for e in range(E):
        slots = slice(routing.offsets[e], routing.offsets[e + 1])
        assert (by_slot[slots] == e).all()
        assert (routing.order[slots].diff() > 0).all(), "tokens of an expert stay in order"
    assert all(len(set(row)) == k for row in routing.experts.tolist()), "a token takes an expert once"


@pytest.mark.parametrize("case", ["random", "all equal", "one expert", "minus infinity", "nan row"])
def test_every_assignment_has_one_slot(backend, case):
    T, E, k = 150, 6, 2
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(0))
    if case == "all equal":
        logits.zero_()
    if case == "one expert":
        logits[:, 3] = 50.0
    if case == "minus infinity":
        logits[:, 2:] = float("-inf")
    if case == "nan row":
        logits[7] = float("nan")
    routing = moe_route(logits, top_k=k)
    check_routing(routing, T=T, E=E, k=k)
    if case == "all equal":
        assert (routing.experts == torch.tensor([0, 1])).all(), "ties go to the lower index"
    if case == "nan row":
        assert routing.weights[7].isnan().all() and routing.weights[:7].isfinite().all(), "overflow stays visible"
    else:
        assert torch.allclose(routing.weights.sum(1), torch.ones(T))


def dense_layer(x, router, up, down, *, top_k):
    weights, experts = (x @ router).softmax(-1).topk(top_k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    per_expert = torch.einsum("tei,eih->teh", torch.einsum("th,ehi->tei", x, up).relu(), down)
    gate = torch.zeros(x.shape[0], up.shape[0]).scatter(1, experts, weights)
    return torch.einsum("te,teh->th", gate, per_expert)


def sparse_layer(x, router, up, down, *, top_k):
    routing = moe_route(x @ router, top_k=top_k)
    hidden = grouped_matmul(x, up, offsets=routing.offsets, order=routing.order, position=routing.position).relu()
    y = grouped_matmul(hidden, down, offsets=routing.offsets)
    return moe_combine(y, weights=routing.weights, position=routing.position)


def test_layer_equals_its_dense_form(backend):
    generator = torch.Generator().manual_seed(1)
    shapes = ((40, 24), (24, 5), (5, 24, 20), (5, 20, 24))
    tensors = [(torch.randn(s, generator=generator) * 0.3).requires_grad_() for s in shapes]
    copies = [t.detach().clone().requires_grad_() for t in tensors]
    d_out = torch.randn(40, 24, generator=generator)
    out, expected = sparse_layer(*tensors, top_k=2), dense_layer(*copies, top_k=2)
    out.backward(d_out)
    expected.backward(d_out)
    assert torch.allclose(out, expected, atol=1e-5)
    for name, mine, theirs in zip(("x", "router", "up", "down"), tensors, copies, strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-5), name


def test_capacity_drops_late_tokens(backend):
    """A layer whose experts take three tokens each equals the dense form with zero weights for the later tokens."""
    T, E, k, capacity = 40, 5, 2, 3
    generator = torch.Generator().manual_seed(2)
    x, up, down = (torch.randn(s, generator=generator) * 0.3 for s in ((T, 24), (E, 24, 20), (E, 20, 24)))
    routing = moe_route(torch.randn(T, E, generator=generator), top_k=k)
    rank = routing.position - routing.offsets[routing.experts.long()]
    kept = rank < capacity
    slots = moe_slots(torch.where(kept, routing.experts, -1), num_experts=E)
    assert torch.equal(slots.counts, routing.counts.clamp_max(capacity)) and slots.offsets[-1] == kept.sum()
    assert torch.equal(slots.position >= 0, kept)

    leaves = [t.clone().requires_grad_() for t in (x, up, down, routing.weights.detach())]
    x1, up1, down1, weights = leaves
    hidden = grouped_matmul(x1, up1, offsets=slots.offsets, order=slots.order, position=slots.position).relu()
    assert (hidden[slots.offsets[-1] :] == 0).all(), "rows behind the last slot"
    y = grouped_matmul(hidden, down1, offsets=slots.offsets)
    out = moe_combine(y, weights=weights, position=slots.position, dropped=True)

    copies = [t.detach().clone().requires_grad_() for t in leaves]
    x2, up2, down2, dense_weights = copies
    per_expert = torch.einsum("tei,eih->teh", torch.einsum("th,ehi->tei", x2, up2).relu(), down2)
    gate = torch.zeros(T, E).scatter(1, routing.experts.long(), dense_weights * kept)
    expected = torch.einsum("te,teh->th", gate, per_expert)
    d_out = torch.randn(T, 24, generator=generator)
    out.backward(d_out)
    expected.backward(d_out)
    assert torch.allclose(out, expected, atol=1e-5)
    for name, mine, theirs in zip(("x", "up", "down", "weights"), leaves, copies, strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-5), name


def test_refuses_unsupported_arguments():
    with pytest.raises(ValueError, match="top_k=5"):
        moe_route(torch.zeros(2, 4), top_k=5)
    with pytest.raises(ValueError, match="offsets"):
        grouped_matmul(torch.zeros(2, 4), torch.zeros(3, 4, 4), offsets=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="moe_combine"):
        moe_combine(torch.zeros(3, 4), weights=torch.zeros(2, 2), position=torch.zeros(2, 2, dtype=torch.int32))
