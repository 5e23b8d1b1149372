"""A released parameter can be read, and nothing can be written into it."""

import copy
import io
import pickle
import warnings

import pytest
import safetensors.torch
import torch
from torch import nn

import ztk.deepspeed as deepspeed
from tests.deepspeed import scripts
from tests.zero.models import Layout, make_engine
from ztk.zero.released import check_saved, is_released, placeholder, release


def _index(p):
    p[0, 0] = 7


def _assign(p):
    p.data = torch.zeros(p.shape)


def _view(p):
    p.data.view(-1)[:3].mul_(0)


WRITES = {
    "zeros_": nn.init.zeros_,
    "normal_": nn.init.normal_,
    "xavier": nn.init.xavier_uniform_,
    "fill_": lambda p: p.fill_(1.0),
    "data.fill_": lambda p: p.data.fill_(1.0),
    "detach.zero_": lambda p: p.detach().zero_(),
    "index": _index,
    "masked_fill_": lambda p: p.masked_fill_(torch.ones(p.shape, dtype=torch.bool), 1.0),
    "copy_": lambda p: p.copy_(torch.ones(p.shape)),
    "data.copy_": lambda p: p.data.copy_(torch.ones(p.shape)),
    "data =": _assign,
    "view": _view,
    "lerp_": lambda p: p.data.lerp_(torch.ones(p.shape), 0.5),
    "load_state_dict": None,
}


def _written(parameters: dict, module: nn.Module) -> dict[str, str]:
    """What each way to write says."""
    said = {}
    for name, write in WRITES.items():
        try:
            with torch.no_grad():
                if write is None:
                    module.load_state_dict(
                        {key: torch.zeros(value.shape) for key, value in module.state_dict().items()}
                    )
                else:
                    write(parameters["blocks.0.up.weight"])
        except RuntimeError as error:
            said[name] = str(error)
    return said


def _reads(parameter: nn.Parameter) -> bool:
    """Reading is possible: everything is NaN."""
    nan = parameter.isnan().all() and parameter.sum().isnan() and torch.isnan(parameter.norm())
    copied = copy.deepcopy(parameter)
    copied.data.fill_(1.0)  # a copy is an ordinary parameter
    known = tuple(parameter.shape), parameter.numel(), parameter.requires_grad, "nan" in repr(parameter)
    return bool(nan) and bool(copied.eq(1).all()) and known[2] and known[3]


def written_at_stage_3(process, *, offload: str) -> dict:
    engine = make_engine(process, layout=Layout(stage=3, offload=offload))
    parameters = dict(engine.module.named_parameters())
    before = {name: value.clone() for name, value in engine.zero.full_parameters()}
    said = _written(parameters, engine.module)
    reads = _reads(parameters["blocks.0.up.weight"])
    after = {name: value.clone() for name, value in engine.zero.full_parameters()}
    same = all(torch.equal(after[name], value) for name, value in before.items())
    others = all(parameter.isnan().all() for parameter in parameters.values())
    engine.close()
    return {"said": said, "reads": reads, "same": same and others}


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_writing_a_released_parameter_is_an_error(ranks, offload):
    for found in ranks(2).run(written_at_stage_3, offload=offload):
        for name in WRITES:
            assert "GatheredParameters" in found["said"].get(name, "nothing"), name
        assert found["reads"] and found["same"]


def written_under_init(process) -> dict[str, str]:
    torch.manual_seed(0)
    with deepspeed.zero.Init():
        model = scripts.SimpleModel()
    said = {}
    for name, write in WRITES.items():
        try:
            with torch.no_grad():
                if write is None:
                    model.load_state_dict(scripts.build().state_dict())
                else:
                    write(model.fc1.weight)
        except RuntimeError as error:
            said[name] = str(error)
    with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0):
        same = torch.equal(model.fc1.weight, scripts.build().fc1.weight)
        nn.init.zeros_(model.fc1.weight)
    with deepspeed.zero.GatheredParameters(model.fc1.weight):
        assert same and model.fc1.weight.eq(0).all()
    return said


def test_writing_a_parameter_that_was_built_sharded_is_an_error(ranks):
    for said in ranks(2).run(written_under_init):
        for name in WRITES:
            assert "GatheredParameters" in said.get(name, "nothing"), name


def released_layer() -> nn.Linear:
    """Its weight is released; its bias is not."""
    layer = nn.Linear(4, 3)
    release(layer.weight, value=placeholder((3, 4), dtype=torch.float32, device=torch.device("cpu")))
    return layer


def test_a_module_is_moved_to_where_it_is():
    """As adapters are made around a sharded layer: `Adapter(layer.weight).to(device).to(dtype)`."""
    layer = released_layer()
    assert layer.to(layer.weight.device).to(layer.weight.dtype) is layer and is_released(layer.weight)
    with pytest.raises(RuntimeError, match="a released parameter of shape"):
        layer.to(torch.bfloat16)


COPIES = {
    "clone": lambda value: value.clone(),
    "half": lambda value: value.half(),
    "reshaped, then copied": lambda value: value.detach().view(-1).clone(),
    "numpy": lambda value: value.numpy(),
    "tolist": lambda value: value.tolist(),
    "cat": lambda value: torch.cat([torch.zeros(3, 4), value]),
    "copied from": lambda value: torch.zeros(3, 4).copy_(value),
    "copied into a module": lambda value: nn.Linear(4, 3).load_state_dict({"weight": value, "bias": torch.zeros(3)}),
    "deepcopy": copy.deepcopy,
    "safetensors": lambda value: safetensors.torch.save({"weight": value}),
}


@pytest.mark.parametrize("how", COPIES)
def test_an_entry_of_a_state_dict_is_not_copied(how):
    layer = released_layer()
    entry = layer.state_dict()["weight"]
    assert entry.shape == (3, 4) and entry.dtype == torch.float32 and entry.numel() == 12 and "nan" in repr(entry)
    with pytest.raises(RuntimeError, match=r"released parameter.*save_16bit_model.*GatheredParameters"):
        COPIES[how](entry)
    assert layer.weight.clone().isnan().all()  # the parameter itself may be read
    assert torch.equal(layer.state_dict()["bias"].clone(), layer.bias)


def test_a_saved_state_dict_warns_cannot_be_loaded_and_ends_training():
    """DeepSpeed-Chat saves the module on rank 0 at every stage, and the full one after it, inside GatheredParameters."""
    layer, file = released_layer(), io.BytesIO()
    with pytest.warns(UserWarning, match=r"shape \(3, 4\) is released.*save_16bit_model"):
        torch.save(layer.state_dict(), file)
    for weights_only, part in ((True, "saved_outside_of_gathered_parameters"), (False, "save_16bit_model")):
        file.seek(0)
        with pytest.raises((RuntimeError, pickle.UnpicklingError), match=part):
            torch.load(file, weights_only=weights_only)
    with pytest.raises(RuntimeError, match="a state dict was saved in which"):
        check_saved()
    check_saved()  # said once
    with pytest.warns(UserWarning, match="is released"):
        torch.save(layer.state_dict(), file)
    with deepspeed.zero.GatheredParameters([layer.bias]):
        check_saved()


def trained_after_saving(process) -> None:
    engine = make_engine(process, layout=Layout(stage=3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(engine.module.state_dict(), io.BytesIO())
    engine.backward(engine(torch.zeros(2, 4, dtype=torch.long)))
    with pytest.raises(RuntimeError, match="a state dict was saved in which"):
        engine.step()
    engine.close()


def test_training_does_not_go_on_after_such_a_file(ranks):
    ranks(2).run(trained_after_saving)
