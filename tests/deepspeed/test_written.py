"""A script's writes into full parameters take effect or raise an error."""

import pytest
import torch
from torch import nn

import ztk.deepspeed as deepspeed
from tests.deepspeed import scripts
from ztk.zero.parameters.released import is_released


def _ways(parameter: nn.Parameter) -> dict:
    return {
        "in place": lambda: parameter.zero_(),
        "data": lambda: parameter.data.copy_(torch.zeros_like(parameter)),
        "view": lambda: parameter.view(-1)[:].fill_(3.0),
        "one element": lambda: parameter.__setitem__((0, 0), 7.0),
    }


def without_modifier_rank(process, *, offload: str, built: bool) -> dict:
    """The error of each way and the weights after it; reading, nesting and a modifier outside raise nothing."""
    if built:
        torch.manual_seed(0)
        with deepspeed.zero.Init():
            model = scripts.SimpleModel()
    else:
        zero = (
            {}
            if offload == "none"
            else {"offload_param": {"device": offload}, "offload_optimizer": {"device": offload}}
        )
        engine, *_ = deepspeed.initialize(model=scripts.build(), config=scripts.config(stage=3, zero=zero))
        model = engine.module
    weight, said = model.fc1.weight, {}
    for name, write in _ways(weight).items():
        try:
            with torch.no_grad(), deepspeed.zero.GatheredParameters([weight, None, model.fc2.bias]):
                write()
        except RuntimeError as error:
            said[name] = str(error)
    with torch.no_grad(), deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
        weight[1] = 5.0
        with deepspeed.zero.GatheredParameters(weight):
            weight.sum()
    with torch.no_grad(), deepspeed.zero.GatheredParameters(weight):
        with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
            weight[2] = 6.0
        weight.sum()
    with deepspeed.zero.GatheredParameters(weight):
        after = weight.detach().clone()
    if not built:
        engine.destroy()
    return {"said": said, "after": after}


@pytest.mark.parametrize(("offload", "built"), [("none", False), ("cpu", False), ("none", True)])
def test_writing_inside_gathered_parameters_without_modifier_rank_is_an_error(ranks, offload, built):
    expected = scripts.build().fc1.weight.detach().clone()
    expected[1], expected[2] = 5.0, 6.0
    for rank, found in enumerate(ranks(2).run(without_modifier_rank, offload=offload, built=built)):
        ways = ["in place", "data", "view", "one element"]
        for name in ways:  # the last is in rank 0's slice; the parameter's version reveals the others
            assert "modifier_rank" in found["said"].get(name, "nothing"), (name, rank)
        assert torch.equal(found["after"], expected)


def nested(process, *, initialize: str) -> dict:
    """Inits inside each other, and initialize inside or after them."""
    config = scripts.config(stage=3)
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = scripts.SimpleModel()
        if initialize == "inside":
            engine, *_ = deepspeed.initialize(model=model, config=config)
            wrapper = nn.Sequential(engine.module)  # a module of an engine's, built while the Init goes on
            other = nn.Linear(3, 3)
    if initialize == "after":
        engine, *_ = deepspeed.initialize(model=model, config=config)
        wrapper, other = nn.Sequential(engine.module), None
    weights = scripts.weights(engine)
    losses = scripts.loop(process, engine, steps=2)
    assert len(list(wrapper.parameters())) == len(weights)
    assert other is None or is_released(other.weight)  # built after it, so sharded
    engine.destroy()
    return {"weights": weights, "losses": losses}


@pytest.mark.parametrize("initialize", ["inside", "after"])
def test_nested_inits(ranks, initialize):
    expected = scripts.build().state_dict()
    losses, _ = scripts.plain(steps=2, clip=0.0)
    for found in ranks(2).run(nested, initialize=initialize):
        for name, value in expected.items():
            assert torch.equal(found["weights"][name], value), name
        assert found["losses"] == pytest.approx(losses, rel=1e-4)


class Retied(nn.Module):
    """Replaces and deletes parameters after `apply` made them full."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head, self.gone = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False), nn.Linear(4, 4)
        self.apply(lambda module: nn.init.ones_(module.weight) if hasattr(module, "weight") else None)
        self.head.weight = self.embedding.weight
        del self.gone


def retied(process) -> tuple[bool, torch.Tensor]:
    with deepspeed.zero.Init():
        model = Retied()
    with deepspeed.zero.GatheredParameters(model.parameters()):
        return model.head.weight is model.embedding.weight, model.head.weight.detach().clone()


def test_parameters_that_are_replaced_while_a_model_is_built(ranks):
    for is_tied, values in ranks(2).run(retied):
        assert is_tied and values.eq(1).all()


# Between steps: the same loop on a plain model and on an engine, with something done to the parameters after every second step.


def _clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.08, 0.08)


def _clamp_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.08, 0.08)


def _zeroed(model: nn.Module) -> None:
    nn.init.zeros_(model.fc2.weight)


def _swap(model: nn.Module) -> None:
    """Other weights for an evaluation, and back."""
    kept = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)
    for parameter, value in zip(model.parameters(), kept, strict=True):
        parameter.data = value.clone()


def _held(model: nn.Module) -> None:
    """Through tensors that the script has from before the first change, whose writes no parameter's version shows."""
    if not hasattr(model, "held"):
        model.held = model.fc2.weight.data, model.fc1.weight.data.view(-1)
    for value in model.held:
        value.mul_(0.7)


def _held_entries(model: nn.Module) -> None:
    """Through tensors made of entries of a state dict."""
    if not hasattr(model, "entries"):
        state = model.state_dict()
        model.entries = state["fc1.weight"].data, state["fc2.weight"].data.view(-1)
    for value in model.entries:
        value.mul_(0.7)


def _exchanged(model: nn.Module) -> None:
    """Other weights for some steps, and the first ones again, of which the script has kept the tensors, not copies."""
    kept, model.kept = getattr(model, "kept", None), [parameter.data for parameter in model.parameters()]
    for number, parameter in enumerate(model.parameters()):
        parameter.data = model.kept[number] * 0.5 if kept is None else kept[number]


def _halved(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def _from_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())


def _loaded(model: nn.Module) -> None:
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})


def _converted(model: nn.Module) -> None:
    dtype = model.fc1.weight.dtype
    model.double().to(dtype)


def _frozen(model: nn.Module) -> None:
    model.fc1.requires_grad_(False)


CHANGES = [
    _clamp,
    _clamp_in_place,
    _zeroed,
    _swap,
    _held,
    _held_entries,
    _exchanged,
    _halved,
    _from_vector,
    _loaded,
    _converted,
    _frozen,
]


def _loop(model: nn.Module, *, change, step, process, dtype) -> None:
    for number in range(6):
        x, y = scripts.data(number)
        x, y = x.chunk(process.world_size)[process.rank].to(dtype), y.chunk(process.world_size)[process.rank]
        step(nn.functional.cross_entropy(model(x).float(), y))
        if number % 2:
            change(getattr(model, "module", model))


def changed_between_steps(process, *, stage: int, bf16: bool, offload: str, number: int) -> str:
    """Returns the word equal, or the error. Raises for a silent difference.

    The plain model's gradients are averaged over the ranks by hand. Its master weights are fp32, and writes into the parameters are copied
    to them.
    """
    change, dtype = CHANGES[number], torch.bfloat16 if bf16 else torch.float32
    zero = {} if offload == "none" else {"offload_optimizer": {"device": offload}}
    config = scripts.config(stage=stage, zero=zero, bf16={"enabled": bf16}, gradient_clipping=0.0)
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.03, "momentum": 0.9}}
    engine, *_ = deepspeed.initialize(model=scripts.build(), config=config)

    def engine_step(loss) -> None:
        engine.backward(loss)
        engine.step()

    try:
        _loop(engine, change=change, step=engine_step, process=process, dtype=dtype)
        said = "equal"
    except (RuntimeError, ValueError) as error:
        said = str(error)
    found = scripts.weights(engine) if said == "equal" else {}
    engine.destroy()
    if not found:
        return said
    plain = scripts.build().to(dtype)
    masters = [parameter.detach().float().clone().requires_grad_() for parameter in scripts.build().parameters()]
    sgd = torch.optim.SGD(masters, lr=0.03, momentum=0.9)

    def plain_step(loss) -> None:
        for parameter, master in zip(plain.parameters(), masters, strict=True):
            same = master.detach().to(dtype) == parameter.detach()
            master.data.copy_(torch.where(same, master.detach(), parameter.detach().float()))
            parameter.grad = None
        loss.backward()
        for parameter, master in zip(plain.parameters(), masters, strict=True):
            master.grad = None
            if parameter.grad is not None:
                master.grad = torch.stack([g.float() for g in _everyones(process, parameter.grad)]).mean(0)
        sgd.step()
        for parameter, master in zip(plain.parameters(), masters, strict=True):
            parameter.data.copy_(master.detach())

    _loop(plain, change=change, step=plain_step, process=process, dtype=dtype)
    for name, parameter in plain.named_parameters():
        # fp32: another order of two sums, over 6 steps. bf16: weights near 0.1 are rounded to 2^-12. After 6 steps of lr 0.03 the effect is
        # below a fifth of the 0.1 by which a lost write differs.
        torch.testing.assert_close(found[name], parameter.detach().float(), rtol=0, atol=2e-2 if bf16 else 1e-5)
    return said


def other_memory_inside(process, *, offload: str) -> dict:
    """`p.data = x` inside GatheredParameters, and the error for a value of another dtype."""
    zero = {} if offload == "none" else {"offload_optimizer": {"device": offload}, "offload_param": {"device": offload}}
    engine, *_ = deepspeed.initialize(model=scripts.build(), config=scripts.config(stage=3, zero=zero))
    scripts.loop(process, engine, steps=1)
    before, parameters = scripts.weights(engine), list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
        _halved(engine.module)
        _from_vector(engine.module)
    after = scripts.weights(engine)
    scripts.loop(process, engine, steps=1, start=1)
    try:
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
            parameters[0].data = parameters[0].data.double()
        said = "nothing"
    except ValueError as error:
        said = str(error)
    engine.destroy()
    return {"same": all(torch.equal(after[name], 0.25 * value) for name, value in before.items()), "said": said}


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_a_parameter_may_get_other_memory_inside_gathered_parameters(ranks, offload):
    for found in ranks(2).run(other_memory_inside, offload=offload):
        assert found["same"]
        assert "parameter fc1.weight: is torch.float64" in found["said"]


def _everyones(process, gradient: torch.Tensor) -> list[torch.Tensor]:
    return process.comm.gather_objects(gradient)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("bf16", "offload"), [(False, "none"), (True, "none"), (False, "cpu")])
def test_what_is_written_between_steps_counts_or_is_an_error(ranks, stage, bf16, offload):
    for number, change in enumerate(CHANGES):
        said = ranks(2).run(changed_between_steps, stage=stage, bf16=bf16, offload=offload, number=number)
        works = stage < 3 or change is _frozen
        assert said[0] == "equal" if works else "GatheredParameters" in said[0], (change.__name__, said)
