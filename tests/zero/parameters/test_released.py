"""A released parameter can be read, and nothing can be written into it."""

import copy
import io
import math
import pickle
import warnings

import pytest
import safetensors.torch
import torch
from torch import nn

import ztk.deepspeed as deepspeed
from tests.deepspeed import scripts
from tests.zero.models import Layout, make_engine
from ztk.zero.parameters import released
from ztk.zero.parameters.released import check_saved, is_released, placeholder, release


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
    """The error of each way to write."""
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
    """Reading is possible: everything is NaN. A copy is an error."""
    nan = all(math.isnan(float(value)) for value in (parameter.sum(), parameter.norm(), parameter.detach().abs().max()))
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match=r"shape .96, 24. cannot be copied or pickled.*GatheredParameters"):
            copied(parameter)
    known = tuple(parameter.shape), parameter.numel(), parameter.requires_grad, "nan" in repr(parameter)
    return nan and known[2] and known[3]


def written_at_stage_3(process, *, offload: str) -> dict:
    engine = make_engine(process, layout=Layout(stage=3, offload=offload))
    parameters = dict(engine.module.named_parameters())
    before = {name: value.clone() for name, value in engine.zero.full_parameters()}
    said = _written(parameters, engine.module)
    reads = _reads(parameters["blocks.0.up.weight"])
    after = {name: value.clone() for name, value in engine.zero.full_parameters()}
    same = all(torch.equal(after[name], value) for name, value in before.items())
    others = all(is_released(parameter) for parameter in parameters.values())
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
    assert math.isnan(layer.weight.clone().sum())  # the parameter itself may be read
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


def _penalty(parameters: list) -> torch.Tensor:
    return sum(parameter.abs().sum() for parameter in parameters)


def _penalty_of_vector(parameters: list) -> torch.Tensor:
    return nn.utils.parameters_to_vector(parameters).abs().sum()


def _penalty_of_parts(parameters: list) -> torch.Tensor:
    return sum(part.abs().sum() for parameter in parameters for part in parameter.split(5))


PENALTIES = (_penalty, _penalty_of_vector, _penalty_of_parts)


AVERAGES = {
    "lerp_": lambda average, p: average.lerp_(p, 0.1),
    "data.add_": lambda average, p: average.data.mul_(0.9).add_(p.data, alpha=0.1),
    "+=": lambda average, p: average.__iadd__(p.detach()),
    "copy_": lambda average, p: average.copy_(p),
    "index": lambda average, p: average.__setitem__(slice(None), p),
    "foreach": lambda average, p: torch._foreach_add_([average], [p]),
    "out=": lambda average, p: torch.mul(p.detach(), 2.0, out=average),
}


def read_where_released(process) -> dict:
    """The error of each use of a released parameter's values; a loss with a term read inside GatheredParameters trains."""
    released._read.clear()
    engine, *_ = deepspeed.initialize(model=scripts.build(), config=scripts.config(stage=3))
    parameters, said = list(engine.module.parameters()), {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert math.isnan(parameters[0].norm()) and f"{parameters[1].norm():.3f}" == "nan"
        torch.zeros_like(parameters[0]).add_(1.0)
        assert all(math.isnan(value.item()) for value in torch._foreach_norm(parameters))
        said["log"] = [str(warning.message) for warning in caught]
    for name, write in AVERAGES.items():
        average = torch.zeros(parameters[0].shape)
        try:
            with torch.no_grad():
                write(average, parameters[0])
        except RuntimeError as error:
            said[name] = str(error)
        assert not average.isnan().any()
    x, y = (part.chunk(process.world_size)[process.rank] for part in scripts.data(0))
    for penalty in PENALTIES:
        try:
            engine.backward(nn.functional.cross_entropy(engine(x), y) + 0.01 * penalty(parameters))
        except RuntimeError as error:
            said[penalty] = str(error)
        engine.engine.discard_gradients()
    loss = nn.functional.cross_entropy(engine(x), y)
    with deepspeed.zero.GatheredParameters(parameters):
        loss = loss + 0.01 * _penalty(parameters)
    engine.backward(loss)
    engine.step()
    said["weights"] = scripts.weights(engine)
    try:
        engine.backward(engine(x * float("inf")).sum())
        engine.step()
    except FloatingPointError as error:
        said["not finite"] = str(error)
    engine.destroy()
    released._read.clear()
    return said


def test_values_of_a_released_parameter_go_nowhere_unsaid(ranks):
    model = scripts.build()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    x, y = scripts.data(0)
    (nn.functional.cross_entropy(model(x), y) + 0.01 * _penalty(list(model.parameters()))).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adam.step()
    for said in ranks(2).run(read_where_released):
        weights = said.pop("weights")
        for name, value in model.named_parameters():
            torch.testing.assert_close(weights[name], value.detach(), rtol=0, atol=1e-6)
        assert len(said["log"]) == 1
        assert "GatheredParameters" in said["log"][0] and "reads as NaN" in said["log"][0]
        for name in AVERAGES:
            assert "GatheredParameters" in said[name] and "another tensor" in said[name], name
        for penalty in PENALTIES:
            assert "GatheredParameters" in said[penalty] and "the loss has it as NaN" in said[penalty], penalty
        assert "released" in said["not finite"]


DECISIONS = {
    "comparison": lambda p: (p > 0).sum(),
    "mask of magnitudes": lambda p: p.abs() > 0.1,
    "mask of a copy": lambda p: p.detach().float().abs() >= p.detach().abs().mean(),
    "argmax": lambda p: p.argmax(),
    "topk": lambda p: p.topk(2),
    "topk of magnitudes": lambda p: p.abs().topk(2),
    "sort": lambda p: p.sort(),
    "isfinite": lambda p: torch.isfinite(p).all(),
    "isnan of a norm": lambda p: p.norm().isnan(),
    "item": lambda p: p[0, 0].item(),
    "float": lambda p: float(p[0, 0]),
    "bool": lambda p: bool(p[0, 0]),
    "if": lambda p: 1 if p.norm() > 1 else 0,
    "max of Python": lambda p: max(p.norm(), 1.0),
    "equal": lambda p: torch.equal(torch.zeros(3, 4), p),
    "allclose": lambda p: torch.allclose(p, torch.zeros(3, 4)),
    "nonzero": lambda p: p.nonzero(),
    "count_nonzero": lambda p: torch.count_nonzero(p),
    "where": lambda p: torch.where(p),
    "integers": lambda p: p.long(),
    "other dtype": lambda p: p.view(torch.int32).sum(),
    "in": lambda p: 1.0 in p,
    "tolist": lambda p: p.tolist(),
    "nan_to_num": lambda p: p.nan_to_num(),
    "nansum": lambda p: p.nansum(),
    "zero norm": lambda p: p.norm(0),
    "zero norms": lambda p: torch._foreach_norm([p], 0),
    "fmax": lambda p: torch.fmax(p, torch.zeros(3, 4)),
    "copysign": lambda p: torch.copysign(torch.ones(3, 4), p),
    "file": lambda p: pickle.dumps(p.norm()),
}


@pytest.mark.parametrize("decision", DECISIONS)
@pytest.mark.filterwarnings("ignore:a released parameter")
def test_no_decision_is_made_of_a_released_parameter(decision):
    with pytest.raises(RuntimeError, match=r"released parameter.*Read it inside deepspeed.zero.GatheredParameters"):
        DECISIONS[decision](released_layer().weight)


@pytest.mark.filterwarnings("ignore:a released parameter")
def test_a_released_parameter_has_its_metadata_and_may_be_logged():
    weight = released_layer().weight
    assert (weight.shape, weight.dim(), weight.numel(), len(weight), weight.stride()) == ((3, 4), 2, 12, 3, (0, 0))
    assert weight.dtype is torch.float32 and weight.requires_grad and weight.is_leaf and weight in [weight]
    assert f"{weight.norm():.2f} {weight.abs().max().item():.1f} {weight.detach().mean()}" == "nan nan nan"
    assert not torch.zeros_like(weight, dtype=torch.bool).any() and "nan" in repr(weight)
    assert math.isnan(torch.stack([weight.norm(), weight.norm()]).sum().item())
