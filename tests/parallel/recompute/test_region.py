"""Recomputing changes no bit: dropout, nesting, keyword arguments, second backwards. Unsupported uses raise errors."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.recompute.models import LAYERS, ROWS, WIDTH, Block, Calls, LiveBytes, build, rows, train
from ztk.core.runtime import MemoryLedger, Tier
from ztk.kernels import operator
from ztk.nn import Decoder, DecoderConfig
from ztk.parallel.recompute import RecomputePolicy, Regions, recompute_blocks

INPUT = ROWS * WIDTH * 4  # bytes of one block's input
KEPT = ROWS * (4 * WIDTH + WIDTH) * 4  # the results of the two linear layers of a block
# Left by any forward: the batch and the last block's result, which the layers around the blocks save, and `scale`.
AROUND = 2 * INPUT + 4

POLICIES = {
    "full": RecomputePolicy(mode="full"),
    "every other": RecomputePolicy(mode="full", every=2),
    "selective": RecomputePolicy(mode="selective"),
    "cpu": RecomputePolicy(mode="full", inputs_on_cpu=True),
    "contiguous": RecomputePolicy(mode="full", contiguous=True),
    "contiguous cpu": RecomputePolicy(mode="selective", contiguous=True, inputs_on_cpu=True, num_checkpoints=6),
}


@pytest.mark.parametrize("name", POLICIES)
def test_every_bit_is_as_without(name):
    model = build()
    recompute_blocks(model, policy=POLICIES[name])
    assert train(model) == train(build())


def test_without_preserved_random_numbers_dropout_differs():
    """The test above would see it."""
    model = build()
    recompute_blocks(model, policy=RecomputePolicy(mode="full", preserve_rng=False))
    assert train(model) != train(build())


@pytest.mark.parametrize(("name", "blocks"), [("full", LAYERS * INPUT), ("selective", LAYERS * (INPUT + KEPT))])
def test_a_forward_keeps_the_computed_bytes(name, blocks):
    model = build()
    recompute_blocks(model, policy=POLICIES[name])
    with LiveBytes() as live:
        loss = model(rows())
    assert live.now == AROUND + blocks and loss.requires_grad
    loss.backward()
    del loss
    assert live.now == 0


def test_selectively_the_products_of_experts_are_kept():
    torch.manual_seed(0)
    sizes = {"vocab_size": 8, "dim": WIDTH, "layers": 2, "heads": 2, "kv_heads": 2, "hidden_dim": 32, "max_seq_len": 8}
    config = DecoderConfig(**sizes, experts=4)
    model = Decoder(config)
    recompute_blocks(model, policy=POLICIES["selective"])
    with Calls() as forward:
        loss = model(torch.arange(8).view(1, 8)).sum()
    with Calls() as backward:
        loss.backward()
    product, gradient = operator("grouped_matmul"), operator("grouped_matmul_weight")
    assert forward.of[product] == 3 * config.layers
    assert backward.of[gradient] == 3 * config.layers
    assert backward.of[product] == 2 * config.layers, "for gradients alone: gate's and up's common one, and down's"


@pytest.mark.parametrize(
    ("name", "tier", "count"),
    [("full", Tier.device, LAYERS), ("every other", Tier.device, LAYERS // 2), ("cpu", Tier.host, LAYERS)],
)
def test_the_ledger_counts_the_inputs(name, tier, count):
    model, ledger = build(), MemoryLedger()
    recompute_blocks(model, policy=POLICIES[name], ledger=ledger)
    loss = model(rows())
    assert ledger.by_category(tier) == {"recompute inputs": count * INPUT}
    loss.backward()
    del loss
    assert ledger.by_category(tier) == {}


def test_the_contiguous_buffer_is_one_and_stays():
    model, ledger = build(), MemoryLedger()
    recompute_blocks(model, policy=POLICIES["contiguous"], ledger=ledger)
    for step, count in enumerate((ROWS, ROWS // 2, ROWS)):
        model(rows(step)[:count]).backward()
        assert ledger.by_category(Tier.device) == {"recompute inputs": LAYERS * INPUT}
    assert ledger.peak(Tier.device) == LAYERS * INPUT


def test_the_contiguous_buffer_raises_when_it_is_full():
    model = build()
    recompute_blocks(model, policy=RecomputePolicy(mode="full", contiguous=True, num_checkpoints=LAYERS))
    first = model(rows())
    with pytest.raises(RuntimeError, match="set recompute.num_checkpoints=8"):
        model(rows())
    first.backward()
    del first
    model(rows()).backward()  # the places came back


def test_the_contiguous_buffer_refuses_a_larger_input_after_smaller_ones():
    regions = Regions(RecomputePolicy(mode="full", contiguous=True), num_regions=2)
    small, large = torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)
    held = regions.run(torch.sin, args=(small,))
    with pytest.raises(RuntimeError, match="inputs of one size"):
        regions.run(torch.sin, args=(large,))
    held.sum().backward()
    del held
    regions.run(torch.sin, args=(large,)).sum().backward()
    assert torch.equal(large.grad, torch.ones(3))


def test_without_gradients_a_region_is_a_call():
    model, ledger = build(), MemoryLedger()
    recompute_blocks(model, policy=POLICIES["full"], ledger=ledger)
    with torch.no_grad():
        assert model.eval()(rows()).item() == build().eval()(rows()).item()
    assert ledger.peak(Tier.device) == 0


def test_an_input_changed_in_place_raises():
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block()])

        def forward(self, x: Tensor) -> Tensor:
            x = x * 2.0
            out = self.blocks[0](x, scale=torch.tensor(1.0))
            x += 1
            return out.sum()

    model = Changed()
    recompute_blocks(model, policy=POLICIES["full"])
    with pytest.raises(RuntimeError, match="changed in place"):
        model(rows().requires_grad_()).backward()
    model = Changed()
    recompute_blocks(model, policy=POLICIES["cpu"])  # a copy does not mind
    model(rows().requires_grad_()).backward()


@pytest.mark.parametrize("name", ["full", "cpu", "contiguous"])
def test_a_graph_may_be_run_backwards_twice(name):
    def twice(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        loss = model(rows())
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    model = build()
    recompute_blocks(model, policy=POLICIES[name])
    assert all(torch.equal(a, b) for a, b in zip(twice(model), twice(build()), strict=True))


@pytest.mark.parametrize("name", ["full", "cpu"])
def test_a_region_in_a_region_saves_nothing_of_its_own(name):
    model, ledger, inner = build(), MemoryLedger(), MemoryLedger()
    for block in model.blocks:
        recompute_blocks(block, policy=replace(POLICIES[name], modules=("up",)), ledger=inner)
    recompute_blocks(model, policy=RecomputePolicy(mode="full", modules=(r"blocks\.\d+",)), ledger=ledger)
    torch.manual_seed(1)
    loss = model(rows())
    assert ledger.by_category(Tier.device) == {"recompute inputs": LAYERS * INPUT}
    assert inner.peak(Tier.device) == inner.peak(Tier.host) == 0
    loss.backward()
    plain = build()
    torch.manual_seed(1)
    plain(rows()).backward()
    assert torch.equal(model.enter.weight.grad, plain.enter.weight.grad)


def test_hooks_around_a_region_keep_working():
    """torch's offloading of saved tensors receives the tensors that the region does not take over."""
    model, seen = build(), []
    recompute_blocks(model, policy=POLICIES["full"])
    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t.shape), t)[1], lambda t: t):
        model(rows()).backward()
    # The batch, the last result, and per block the input and `scale`.
    assert len(seen) >= LAYERS
    plain = build()
    torch.manual_seed(1)
    plain(rows()).backward()
    assert torch.equal(model.enter.weight.grad, plain.enter.weight.grad)


def test_structures_go_in_and_out():
    def function(pair: dict, *, factor: float, flag: Tensor) -> tuple:
        return {"out": pair["x"] * factor}, flag, "text"

    x = torch.ones(3, requires_grad=True)
    regions = Regions(RecomputePolicy(mode="full"))
    out, flag, text = regions.run(function, args=({"x": x},), kwargs={"factor": 2.0, "flag": torch.tensor(True)})
    out["out"].sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0)) and bool(flag) and text == "text"
