"""`torch.func`, second derivatives and torch.export over an engine's model have plain torch's values, or an error names a way out."""

from collections.abc import Callable, Collection
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jvp, linearize
from torch.fx.experimental.proxy_tensor import make_fx

from tests.parallel.topology.runs import arranged
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.runtime import Process, Topology
from ztk.kernels import set_backend
from ztk.nn import Decoder, DecoderConfig, initial_values, initialise
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.parallel.tensor import TensorPolicy

CONFIG = DecoderConfig(vocab_size=16, dim=8, layers=1, heads=2, kv_heads=2, hidden_dim=8, max_seq_len=8)
WEIGHT = "norm.weight"  # whole on every rank
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # float32 sums of at most 32 terms, three layers deep, in another order


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x)))).square().mean()


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model, its inputs and its full weights. first: the module whose output `differentiated_twice` varies."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    weights: dict[str, Tensor]
    first: str

    def of(self, weight: Tensor) -> Tensor:
        """The loss with another value of `WEIGHT`."""
        return self.of_inputs(weight, *self.inputs)

    def of_inputs(self, weight: Tensor, *inputs: Tensor) -> Tensor:
        return functional_call(self.model, {**self.weights, WEIGHT: weight}, inputs)

    @property
    def weight(self) -> Tensor:
        return self.weights[WEIGHT]

    @property
    def direction(self) -> Tensor:
        return torch.arange(1.0, 1 + self.weight.numel())

    def differentiated_twice(self) -> Tensor:
        """The gradient of a gradient's square, by the engine's own weights."""
        outputs: list[Tensor] = []
        handle = self.model.get_submodule(self.first).register_forward_hook(lambda *args: outputs.append(args[2]))
        loss = self.model(*self.inputs)
        handle.remove()
        (first,) = torch.autograd.grad(loss, outputs[0], create_graph=True)
        return torch.autograd.grad(first.square().sum(), outputs[0])[0]

    def forward_mode(self) -> Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(self.of(forward_ad.make_dual(self.weight, self.direction))).tangent

    def per_sample(self) -> Tensor:
        one = grad(lambda weight, *inputs: self.of_inputs(weight, *(x[None] for x in inputs)))
        return torch.vmap(one, (None,) + (0,) * len(self.inputs))(self.weight, *self.inputs)

    def by_reference(self) -> Tensor:
        with reference():
            return self.differentiated_twice()


WAYS: dict[str, Callable[[Case], Tensor]] = {
    "grad": lambda case: grad(case.of)(case.weight),
    "jvp": lambda case: jvp(case.of, (case.weight,), (case.direction,))[1],
    "hessian": lambda case: hessian(case.of)(case.weight),
    "forward mode": Case.forward_mode,
    "per sample": Case.per_sample,
    "vmap": lambda case: torch.vmap(lambda *inputs: case.model(*(x[None] for x in inputs)))(*case.inputs).detach(),
    "second": Case.differentiated_twice,
    "second by reference": Case.by_reference,
    "linearize": lambda case: linearize(case.of, case.weight)[1](case.direction),
    "make_fx": lambda case: make_fx(lambda weight: grad(case.of)(weight))(case.weight)(case.weight),
    "export": lambda case: torch.export.export(case.model, case.inputs).module()(*case.inputs).detach(),
}
RECORDED = ("linearize", "make_fx", "export")
NO_SECOND, NOT_RECORDED, IS_GATHERED = "set_backend('reference')", "ztk.checkpoint.full_state_dict", "take a copy"


def refused(kind: str, *, stage: int, tensor: int) -> dict[str, str]:
    """The ways that do not work, with a part of their errors."""
    errors = {"second": NO_SECOND} if kind == "decoder" else {}
    if tensor > 1:
        return {**errors, **dict.fromkeys(RECORDED, NOT_RECORDED)}
    return {**errors, "export": IS_GATHERED} if stage == 3 else errors


@contextmanager
def reference():
    set_backend("reference")
    try:
        yield
    finally:
        set_backend("auto")


def inputs_of(kind: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    if kind == "own":
        return (torch.randn(2, 4, 6, generator=generator),)
    tokens = torch.randint(CONFIG.vocab_size, (2, 5), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def outcomes(case: Case, *, without: Collection[str] = ()) -> dict[str, Tensor | str]:
    found: dict[str, Tensor | str] = {}
    for name in [name for name in WAYS if name not in without]:
        try:
            found[name] = WAYS[name](case)
        except RuntimeError as error:
            found[name] = str(error)
    return found


def under_engine(process: Process, *, kind: str, stage: int, tensor: int) -> dict[str, Tensor | str]:
    options = {}
    if kind == "decoder":
        with torch.device("meta"):
            model = Decoder(CONFIG)
        options["initial_values"] = partial(initial_values, model, seed=3)
    else:
        model = Own()
        options["tensor"] = TensorPolicy(plan={"up": "column", "down": "row"} if tensor > 1 else None)
    engine = parallelize(
        model,
        process=arranged(process, topology=Topology(tensor=tensor)),
        optimizer=OptimizerPolicy(lr=1e-2),
        zero=ZeroPolicy(stage=stage, bucket_size=100),
        **options,
    )
    weights = {name: value.detach().clone() for name, value in engine.zero.full_parameters()}
    case = Case(model=engine.module, inputs=inputs_of(kind), weights=weights, first=FIRST[kind])
    found = outcomes(case, without=["linearize"] if tensor == 1 else [])  # a second of tracing, as by make_fx
    engine.close()
    return found


FIRST = {"decoder": "embedding", "own": "norm"}


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Tensor | str]]:
    """By plain torch, without an engine."""
    values = {}
    with reference():
        for kind, model in (("decoder", initialise(Decoder(CONFIG), seed=3)), ("own", Own())):
            weights = {name: value.detach() for name, value in model.named_parameters()}
            case = Case(model=model, inputs=inputs_of(kind), weights=weights, first=FIRST[kind])
            values[kind] = outcomes(case, without=["second by reference", *RECORDED])
            same = {"second by reference": "second", "linearize": "jvp", "make_fx": "grad"}
            values[kind] |= {name: values[kind][other] for name, other in same.items()}
            values[kind]["export"] = model(*case.inputs).detach()
    return values


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ["decoder", "own"])
def test_a_derivative_has_the_value_of_plain_torch_or_names_a_way_out(ranks, expected, kind, stage, tensor):
    errors = refused(kind, stage=stage, tensor=tensor)
    for found in ranks(2).run(under_engine, kind=kind, stage=stage, tensor=tensor):
        for name, value in found.items():
            if name in errors:
                assert isinstance(value, str) and errors[name] in value, (name, value)
            else:
                assert isinstance(value, Tensor), (name, value)
                torch.testing.assert_close(
                    value, expected[kind][name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
                )
