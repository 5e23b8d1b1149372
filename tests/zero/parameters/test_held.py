"""Memory that a script has held since before the engine moved the parameters out of it."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ztk.deepspeed as deepspeed
from tests.deepspeed import scripts
from ztk.zero.parameters.watched import take_data_mark, watch

HOLD = {
    "data": lambda model: model.fc2.weight.data,
    "numpy": lambda model: model.fc2.weight.detach().numpy(),
    "state": lambda model: model.state_dict()["fc2.weight"],
}


def written_through_an_alias(process, *, stage: int, offload: str) -> dict:
    """Training's message after a write into each kind of memory; the effect on memory that is only read, or dropped."""
    zero = {} if offload == "none" else {"offload_optimizer": {"device": offload}}
    said = {}
    for name, hold in HOLD.items():
        model = scripts.build()
        kept = hold(model)
        engine, *_ = deepspeed.initialize(model=model, config=scripts.config(stage=stage, zero=zero))
        scripts.loop(process, engine, steps=1)
        kept[:] = 0
        try:
            scripts.loop(process, engine, steps=1, start=1)
            said[name] = "trained"
        except RuntimeError as error:
            said[name] = str(error)
        engine.engine.discard_gradients()
        scripts.loop(process, engine, steps=1, start=1)  # the write was said; the engine's weights are its own
        del kept
        scripts.loop(process, engine, steps=1, start=2)
        assert not engine.engine.zero._held._held
        engine.destroy()
        again, *_ = deepspeed.initialize(model=model, config=scripts.config(stage=stage))  # of an engine's memory
        assert not again.engine.zero._held._held
        again.destroy()
    return said


@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), (2, "cpu"), (3, "none")])
def test_a_write_into_memory_from_before_the_engine_is_an_error(ranks, stage, offload):
    for said in ranks(2).run(written_through_an_alias, stage=stage, offload=offload):
        for name in HOLD:
            assert "fc2.weight" in said[name] and "before initialize" in said[name] and "clone()" in said[name], name


def written_by_numpy(process, *, is_held: bool) -> torch.Tensor:
    """Writes through a numpy array of a parameter whose master weights are in main memory: they change neither version nor address."""
    zero = {"offload_optimizer": {"device": "cpu"}}
    config = scripts.config(stage=2, zero=zero, gradient_clipping=0.0)
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.03, "momentum": 0.9}}
    engine, *_ = deepspeed.initialize(model=scripts.build(), config=config)
    array = engine.module.fc2.weight.detach().numpy()
    scripts.loop(process, engine, steps=1)
    if is_held:
        array[:] *= 0.5
    else:
        del array
        engine.module.fc2.weight.detach().numpy()[:] *= 0.5
    scripts.loop(process, engine, steps=1, start=1)
    weight = scripts.weights(engine)["fc2.weight"]
    engine.destroy()
    return weight


def test_a_write_by_numpy_reaches_master_weights(ranks):
    model = scripts.build()
    sgd = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    for step in range(2):
        if step == 1:
            model.fc2.weight.data.mul_(0.5)
        x, y = scripts.data(step)
        nn.functional.cross_entropy(model(x), y).backward()
        sgd.step()
        sgd.zero_grad()
    for is_held in (True, False):
        for weight in ranks(2).run(written_by_numpy, is_held=is_held):
            torch.testing.assert_close(weight, model.fc2.weight.detach(), rtol=0, atol=1e-6)  # two orders of summation


SHOW = {
    "numpy": lambda model: model.fc2.weight.detach().numpy(),
    "numpy of data": lambda model: model.fc2.weight.data.numpy(),
    "numpy of an entry": lambda model: model.state_dict()["fc2.weight"].numpy(),
    "view of an entry": lambda model: model.state_dict()["fc2.weight"].view(-1),
    "entry": lambda model: model.state_dict()["fc2.weight"],
}


def other_memory_while_shown(process, *, stage: int) -> dict[str, str]:
    """`p.data = x` while the script holds the old memory: the next step's error, or the value of the script's tensor."""
    said = {}
    for name, show in SHOW.items():
        engine, *_ = deepspeed.initialize(model=scripts.build(), config=scripts.config(stage=stage))
        shown, weight = show(engine.module), engine.module.fc2.weight
        before = weight.detach().clone()
        weight.data = 0.5 * weight.data
        try:
            scripts.loop(process, engine, steps=1)
            said[name] = "old values" if torch.equal(shown, before) else "new values"
        except RuntimeError as error:
            said[name] = str(error)
        engine.destroy()
    return said


@pytest.mark.parametrize("stage", [0, 2])
def test_other_memory_leaves_the_old_one_alone_or_is_an_error(ranks, stage):
    for said in ranks(2).run(other_memory_while_shown, stage=stage):
        assert said.pop("entry") == "old values"
        for name, text in said.items():
            assert "parameter fc2.weight: got other memory" in text and "clone()" in text, (name, text)


def test_recomputation_counts_as_no_read_of_a_parameter():
    """It detaches the weights that it saves: the next step would compare all of them with their master weights."""
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    watch(layer.weight)
    checkpoint(lambda x: layer(x).relu(), x, use_reentrant=False).sum().backward()
    assert not take_data_mark(layer.weight, is_viewed=lambda: False)
    layer.weight.detach()
    assert take_data_mark(layer.weight, is_viewed=lambda: False)
