"""Both layers on one rank: against plain loops and the dense computation; arguments that are refused."""

from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.moe.runs import CONFIG, Expert
from ztk.core.runtime import Comm
from ztk.core.runtime.comm.transport import SingleRankTransport
from ztk.kernels import moe_route
from ztk.nn import DecoderConfig
from ztk.nn.mlp import SwiGLU
from ztk.nn.moe import Router, SparseMLP
from ztk.parallel.moe import MoE, expert_metrics
from ztk.parallel.moe.exchange import gather_rows
from ztk.parallel.pipeline import MicroBatch
from ztk.train.engine.batches import BatchEngine

SINGLE_RANK = Comm(SingleRankTransport(), rank=0, size=1, device=torch.device("cpu"))


def sparse(**changes) -> SparseMLP:
    torch.manual_seed(0)
    values = {name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__} | changes
    return SparseMLP(DecoderConfig(**values))


def loop(layer: SparseMLP, x: torch.Tensor) -> torch.Tensor:
    """Token by token, in float64."""
    double = {name: value.detach().double() for name, value in layer.named_parameters()}
    out = torch.zeros_like(x, dtype=torch.float64)
    for t, token in enumerate(x.detach().double()):
        probabilities = (double["router.weight"] @ token).softmax(0)
        best = probabilities.topk(layer.top_k)
        for weight, e in zip(best.values / best.values.sum(), best.indices.tolist(), strict=True):
            gate, up, down = (double[f"experts.{name}"][e] for name in ("gate", "up", "down"))
            out[t] += weight * ((torch.nn.functional.silu(token @ gate) * (token @ up)) @ down)
        if layer.shared is not None:
            gate, up, down = (double[f"shared.{name}.weight"] for name in ("gate", "up", "down"))
            out[t] += down @ (torch.nn.functional.silu(gate @ token) * (up @ token))
    return out


@pytest.mark.parametrize("changes", [{}, {"experts_per_token": 1}, {"experts_per_token": 4, "shared_hidden_dim": 0}])
def test_the_dropless_layer_equals_a_loop_over_tokens(changes):
    layer = sparse(**changes)
    x = torch.randn(2, 9, CONFIG.dim)
    # fp32 sums of 32 products: 32 * 2^-24 relative to terms up to 1
    torch.testing.assert_close(layer(x).flatten(0, 1).double(), loop(layer, x.flatten(0, 1)), rtol=1e-5, atol=2e-6)


def test_with_equal_routing_it_equals_the_dense_computation():
    """Every expert is the dense layer: whoever is chosen, the weights sum to one. And all experts with equal weights are their mean."""
    layer = sparse(shared_hidden_dim=0, expert_hidden_dim=CONFIG.hidden_dim)
    dense = SwiGLU(CONFIG)
    with torch.no_grad():
        for name in ("gate", "up", "down"):
            getattr(layer.experts, name).copy_(getattr(dense, name).weight.t().expand_as(getattr(layer.experts, name)))
    x = torch.randn(3, 7, CONFIG.dim, requires_grad=True)
    d_out = torch.randn(3, 7, CONFIG.dim)
    layer.losses.balance_weight = layer.losses.z_weight = 0.0
    (d_sparse,) = torch.autograd.grad(layer(x), x, d_out)
    (d_dense,) = torch.autograd.grad(dense(x), x, d_out)
    torch.testing.assert_close(layer(x), dense(x), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(d_sparse, d_dense, rtol=1e-5, atol=5e-6)

    mean = sparse(shared_hidden_dim=0, experts_per_token=4)
    with torch.no_grad():
        mean.router.weight.zero_()
    torch.testing.assert_close(mean(x).flatten(0, 1).double(), loop(mean, x.flatten(0, 1)), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_token_has_the_same_gradient_wherever_its_slots_are_added_up(dtype):
    """After the products, or on the token's rank after the all-to-all: in 16 bit each slot's gradient is rounded once, and so is the sum."""
    layer = sparse().to(dtype)
    x = torch.randn(40, CONFIG.dim).to(dtype).requires_grad_()
    routing = moe_route(layer.router(x), top_k=layer.top_k)
    d_rows = torch.randn(80, CONFIG.dim).to(dtype)
    where = {"order": routing.order, "position": routing.position}
    here = layer.experts(x, offsets=routing.offsets, **where)
    there = layer.experts(gather_rows(x, **where), offsets=routing.offsets)
    (d_here,), (d_there,) = (torch.autograd.grad(rows, x, d_rows) for rows in (here, there))
    assert torch.equal(here, there) and torch.equal(d_here, d_there)


def test_router_losses_have_the_weight_of_a_micro_batchs_tokens():
    """Where fewer targets count, the loss has another weight than the means over all tokens."""
    layer = sparse(balance_loss_weight=0.3)
    x = torch.randn(11, CONFIG.dim)

    class Engine(BatchEngine):
        module, accumulation_steps = layer, 1
        backward, step = staticmethod(torch.Tensor.backward), staticmethod(lambda: None)

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return layer(x).sum()

    def gradient(**weights: float) -> torch.Tensor:
        layer.zero_grad()
        Engine().train_batch([MicroBatch(args=(x,), **weights)])
        return layer.router.weight.grad

    full = gradient(weight=0.0, token_weight=1.0)
    assert full.any() and layer.losses.weight == 1.0
    assert torch.equal(gradient(weight=0.0, token_weight=0.5), full / 2)
    assert not gradient(weight=0.0).any()


def test_router_losses_reach_the_router_whatever_the_loss_is():
    """Their gradients equal the formulas' gradients times the loss scale."""
    layer = sparse(balance_loss_weight=0.3, router_z_loss_weight=0.2)
    layer.losses.loss_scale = torch.tensor(8.0)
    x = torch.randn(11, CONFIG.dim)
    (layer(x) * 0).sum().backward()
    weight = layer.router.weight.detach().clone().requires_grad_()
    logits = x @ weight.t()
    share = torch.bincount(logits.topk(2, dim=1).indices.flatten(), minlength=4) / 22
    loss = 0.3 * 4 * (share * logits.softmax(1).mean(0)).sum() + 0.2 * logits.logsumexp(1).square().mean()
    loss.backward()
    torch.testing.assert_close(layer.router.weight.grad, 8 * weight.grad, rtol=1e-5, atol=1e-7)
    assert not layer.experts.gate.grad.any()


def test_the_balance_loss_is_of_a_micro_batch():
    """Two halves of a step have the mean of their own losses, each by the formula over its own tokens; the full step has another loss.

    The z-loss, a mean over tokens, has the loss of the full step however it is divided.
    """
    layer = sparse(balance_loss_weight=0.3, router_z_loss_weight=0.2)
    x = torch.randn(24, CONFIG.dim)

    def by_formula(part: torch.Tensor) -> tuple[float, float]:
        logits = part.double() @ layer.router.weight.detach().double().t()
        share = torch.bincount(logits.topk(2, dim=1).indices.flatten(), minlength=4) / (2 * len(part))
        return float(4 * (share * logits.softmax(1).mean(0)).sum()), float(logits.logsumexp(1).square().mean())

    def measured(*parts: torch.Tensor) -> tuple[float, float]:
        with torch.no_grad():
            for part in parts:
                layer(part)
        found = expert_metrics(nn.ModuleDict({"moe": layer}), comm=SINGLE_RANK)
        return found["moe.balance_loss"], found["moe.z_loss"]

    full, halves = by_formula(x), [by_formula(half) for half in x.chunk(2)]
    divided = [sum(values) / 2 for values in zip(*halves, strict=True)]
    assert measured(x) == pytest.approx(full, rel=1e-6)  # fp32 sums of 24 tokens
    assert measured(*x.chunk(2)) == pytest.approx(divided, rel=1e-6)
    assert abs(divided[0] - full[0]) > 1e-2 and divided[1] == pytest.approx(full[1], rel=1e-12)


def test_metrics_cover_the_forwards_since_the_last_call():
    layer = nn.ModuleDict({"mlp": sparse(), "moe": MoE(32, Expert(32), num_experts=4, min_capacity=0)})
    with torch.no_grad():
        layer["mlp"].router.weight.zero_()  # ties go to the first two experts
        layer["moe"].gate.weight.zero_()  # and here to the first: of 20 tokens it takes 5
    layer["mlp"](torch.randn(20, 32))
    layer["moe"](torch.randn(20, 32))
    module_metrics = expert_metrics(layer, comm=SINGLE_RANK)
    assert module_metrics["moe.load"] == {"mlp": [0.5, 0.5, 0.0, 0.0], "moe": [1.0, 0.0, 0.0, 0.0]}
    assert module_metrics["moe.max_load"] == 4.0 and module_metrics["moe.min_load"] == 0.0
    assert module_metrics["moe.dropped"] == pytest.approx(15 / 60)
    assert module_metrics["moe.balance_loss"] == pytest.approx(1.0)  # probabilities are even, whoever is chosen
    assert expert_metrics(layer, comm=SINGLE_RANK) == {}
    layer.eval()["mlp"](torch.randn(20, 32))
    assert expert_metrics(layer, comm=SINGLE_RANK) == {}, "evaluation does not count"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_experts": 3, "ep_size": 2}, "num_experts=3 must be a multiple of ep_size=2"),
        ({"k": 5}, "k=5: must be from 1 to num_experts=4"),
        ({"noisy_gate_policy": "Gauss"}, "must be 'Jitter', 'RSample' or None"),
        ({"use_tutel": True}, "use_tutel=True"),
        ({"enable_expert_tensor_parallelism": True}, "enable_expert_tensor_parallelism=True"),
    ],
)
def test_arguments_that_cannot_act_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        MoE(8, Expert(8), **{"num_experts": 4, **arguments})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 5}, "model.experts_per_token=5: must be from 1 to model.experts=4"),
        ({"experts_every": 3}, "model.experts_every=3"),
        ({"balance_loss_weight": -1.0}, "model.balance_loss_weight=-1.0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        sparse(**changes)


def test_parameters_and_operations_are_counted():
    """A token uses 2 of 4 experts: six operations per weight that it uses."""
    from ztk.nn import Decoder

    with torch.device("meta"):
        model = Decoder(CONFIG)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert CONFIG.parameter_count() == sum(sizes.values())
    used = {name: size // 2 if ".experts." in name else size for name, size in sizes.items()}
    multiplied = sum(size for name, size in used.items() if "norm" not in name and "embedding" not in name)
    assert CONFIG.flops_per_token(8) == 6 * multiplied + 12 * CONFIG.layers * CONFIG.dim * 8
    assert [CONFIG.has_experts(block) for block in range(2)] == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_routers_product_has_the_bits_of_fp32_and_saves_no_copy(dtype):
    router = Router(CONFIG).to(dtype)
    tokens = torch.randn(70, CONFIG.dim).to(dtype).requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        logits = router(tokens)
    d_logits = torch.randn_like(logits)
    found = torch.autograd.grad(logits, (tokens, router.weight), d_logits)
    plain = tokens.float() @ router.weight.float().t()
    wanted = torch.autograd.grad(plain, (tokens, router.weight), d_logits)
    assert logits.dtype == torch.float32 and torch.equal(logits, plain)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert {x.dtype for x in saved} == {dtype}


def test_on_a_gpu_a_router_multiplies_in_its_own_dtype_and_adds_up_in_fp32():
    class Products(TorchDispatchMode):
        seen: ClassVar[list[tuple]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket is torch.ops.aten.mm:
                self.seen.append((func._overloadname, args[0].dtype))
            return func(*args, **(kwargs or {}))

    with torch.device("meta"):
        router, tokens = Router(CONFIG).to(torch.bfloat16), torch.empty(70, CONFIG.dim, dtype=torch.bfloat16)
    with Products():
        logits = router(tokens)
        logits.sum().backward()
    assert Products.seen == [("dtype", torch.bfloat16), ("default", torch.float32)]  # of tokens that need no gradient
    assert logits.dtype == torch.float32 and router.weight.grad.dtype == torch.bfloat16
