"""torch's transforms of functions, modules and parameters work on an engine's model, or an error names the fix."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ztk.deepspeed as deepspeed
from tests.deepspeed import scripts


class Keeps(torch.autograd.Function):
    """Keeps its weight as an attribute."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return gradient @ ctx.weight, gradient.t() @ x


class Keeping(scripts.SimpleModel):
    def forward(self, x: Tensor) -> Tensor:
        return Keeps.apply(F.relu(self.fc1(x)), self.fc2.weight)


class Traced(nn.Module):
    """A traced module between others, and traced elements of a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1 = torch.jit.trace(nn.Linear(28, 32), torch.zeros(2, 28))
        self.layers = nn.ModuleList(torch.jit.trace(nn.Linear(32, 32), torch.zeros(2, 32)) for _ in range(2))
        self.fc2 = torch.jit.script(nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.fc2(x)


def _clip(engine, x: Tensor, y: Tensor) -> None:
    engine.backward(F.cross_entropy(engine(x), y))
    try:
        nn.utils.clip_grad_value_(engine.module.parameters(), 0.01)
    finally:
        engine.engine.discard_gradients()


TRANSFORMS = {
    "func.grad": lambda engine, x, y: torch.func.grad(lambda z: F.cross_entropy(engine(z), y))(x),
    "func.grad of weights": lambda engine, x, y: torch.func.grad(
        lambda weights: F.cross_entropy(torch.func.functional_call(engine.module, weights, (x,)), y)
    )(dict(engine.module.named_parameters())),
    "func.jvp": lambda engine, x, y: torch.func.jvp(engine.module, (x,), (x,)),
    "func.jacrev": lambda engine, x, y: torch.func.jacrev(engine.module)(x[0]),
    "trace": lambda engine, x, y: torch.jit.trace(engine.module, x),
    "nn.Parameter": lambda engine, x, y: nn.Parameter(engine.module.fc2.weight),
    "clip_grad_value_": _clip,
}
REFUSED = {
    **dict.fromkeys(("func.grad", "func.grad of weights", "func.jvp", "func.jacrev"), ("torch.autograd.grad", {3})),
    "trace": ("Trace it before initialize", {3}),
    "nn.Parameter": (r"nn.Parameter(p.detach().clone())", {0, 3}),
    "clip_grad_value_": ("gradient_clipping", {3}),
}


def transformed(process, *, stage: int) -> dict[str, str]:
    engine, *_ = deepspeed.initialize(model=scripts.build(), config=scripts.config(stage=stage))
    x, y = (part.chunk(process.world_size)[process.rank] for part in scripts.data(0))
    said = {}
    for name, transform in TRANSFORMS.items():
        try:
            transform(engine, x, y)
            said[name] = "works"
        except RuntimeError as error:
            said[name] = str(error)
    rows = torch.vmap(engine.module)(x)
    torch.testing.assert_close(rows, engine(x), rtol=1e-5, atol=1e-6)  # batched products round in another order
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        plain = copy.deepcopy(engine.module)
    expected = torch.func.grad(lambda z: F.cross_entropy(plain(z), y))(x)
    torch.testing.assert_close(expected, torch.func.grad(lambda z: F.cross_entropy(scripts.build()(z), y))(x))
    scripts.loop(process, engine, steps=1)  # it still trains
    engine.destroy()
    return said


@pytest.mark.parametrize("stage", [0, 3])
def test_a_transform_works_or_names_the_way_out(ranks, stage):
    for said in ranks(2).run(transformed, stage=stage):
        for name, (part, stages) in REFUSED.items():
            assert part in said[name] if stage in stages else said[name] == "works", (name, said[name])


def results(model: nn.Module, *, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Any]:
    """Gradients, gradients per sample and a directional derivative of `weights`, and a gradient of the input."""

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)

    def one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(weights, x[None], y[None])

    tangents = {name: torch.ones_like(weight) for name, weight in weights.items()}
    return {
        "grad": torch.func.grad(loss)(weights, x, y),
        "per sample": torch.func.vmap(torch.func.grad(one), (None, 0, 0))(weights, x, y),
        "jvp": torch.func.jvp(lambda weights: loss(weights, x, y), (weights,), (tangents,)),
        "vjp": torch.func.vjp(lambda weights: loss(weights, x, y), weights)[1](torch.ones(()))[0],
        "of the input": torch.func.grad(lambda x: loss(weights, x, y))(x),
    }


def check_full(process, *, stage: int) -> list[str]:
    """Compares transforms of full weights with a model's without an engine. Returns the errors of weights that are not full."""
    engine, *_ = deepspeed.initialize(model=scripts.build(), config=scripts.config(stage=stage))
    model, (x, y), plain = engine.module, scripts.data(0), scripts.build()
    expected = results(plain, weights={name: value.detach() for name, value in plain.named_parameters()}, x=x, y=y)
    with torch.no_grad(), deepspeed.zero.GatheredParameters(list(model.parameters())):
        copies = {name: value.detach().clone() for name, value in model.named_parameters()}
        inside = results(model, weights={name: value.detach() for name, value in model.named_parameters()}, x=x, y=y)
        of_input = torch.func.grad(lambda x: F.cross_entropy(model(x), y))(x)
    # Other kernels for other memory may sum the products of at most 32 terms in another order, with errors of 2^-24 each.
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    close(inside, expected)
    close(of_input, expected["of the input"])
    close(results(model, weights=copies, x=x, y=y), expected)

    def in_context() -> None:
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            torch.func.grad(lambda x: model(x).sum())(x)

    said = []
    head = {name: value for name, value in copies.items() if name.startswith("fc2")}
    for call in (
        lambda: torch.func.grad(lambda x: torch.vmap(model)(x).sum())(x),
        lambda: torch.func.grad(lambda w: torch.func.functional_call(model, w, (x,)).sum())(head),
        lambda: torch.func.grad(lambda w: torch.func.functional_call(model, w, (x,)).sum())(
            {name: value.detach() for name, value in model.named_parameters()}
        ),
        in_context,
    ):
        try:
            call()
            said.append("works")
        except RuntimeError as error:
            said.append(str(error))
    scripts.loop(process, engine, steps=1)  # it still trains
    engine.destroy()
    return said


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_transforms_of_full_weights_have_the_values_of_a_plain_model(ranks, stage):
    for said in ranks(2).run(check_full, stage=stage):
        *sharded, in_context = said
        if stage < 3:
            assert sharded == ["works"] * 3
        else:
            assert all("Pass copies of all of them by torch.func.functional_call" in each for each in sharded), sharded
            assert "enter it inside torch.no_grad()" in in_context


def trained(process, *, stage: int, make) -> tuple[str, list[float]]:
    try:
        engine, *_ = deepspeed.initialize(model=make(), config=scripts.config(stage=stage))
        losses = scripts.loop(process, engine, steps=3)
        engine.destroy()
    except (RuntimeError, ValueError) as error:
        return str(error), []
    return "trained", losses


def test_traced_modules_train_and_outlive_their_engine(ranks):
    usual = ranks(2).run(trained, stage=0, make=Traced)
    assert usual[0][0] == "trained" and ranks(2).run(trained, stage=3, make=Traced) == usual


def test_a_function_that_keeps_its_weight_on_ctx_is_named_at_stage_3(ranks):
    assert ranks(2).run(trained, stage=0, make=Keeping)[0][0] == "trained"
    for said, _ in ranks(2).run(trained, stage=3, make=Keeping):
        assert "ctx.save_for_backward(weight)" in said and "shape (10, 32)" in said


def _lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 10))


def test_a_lazy_module_needs_a_forward_first(ranks):
    for said, _ in ranks(2).run(trained, stage=0, make=_lazy):
        assert "parameter 0.weight of a lazy module" in said and "run one forward" in said


def traced_under_init(process) -> str:
    try:
        with deepspeed.zero.Init():
            Traced()
    except RuntimeError as error:
        return str(error)
    return "built"


def test_tracing_inside_zero_init_is_refused(ranks):
    for said in ranks(2).run(traced_under_init):
        assert "trace the module outside of zero.Init" in said
