"""Full parameters, gradients and states of sharded ones."""

import pytest
import torch
from torch.nn import functional as F

import ztk.deepspeed as deepspeed
from tests.deepspeed import scripts
from tests.deepspeed.test_train import STAGES

CASES = [
    (0, False, "none"),
    (1, True, "none"),
    (2, False, "cpu"),
    (3, False, "none"),
    (3, True, "cpu"),
    (3, False, "nvme"),
]


@pytest.mark.parametrize(("stage", "bf16", "offload"), CASES)
def test_full_parameters_are_read_and_changed(ranks, stage, bf16, offload):
    first, second = ranks(2).run(scripts.gathered, stage=stage, bf16=bf16, offload=offload)
    for name, value in first["master"].items():
        assert torch.equal(value, second["master"][name])
        cast = value.bfloat16().float() if bf16 else value
        assert torch.equal(first["seen"][name], cast)
        kept = first["changed"][name]
        if name == "fc1.weight":
            assert torch.equal(kept[0], torch.full_like(kept[0], 0.5)) and torch.equal(kept[1:], value[1:])
        else:
            assert torch.equal(kept, value)
    for found in (first, second):
        assert found["after"]["fc1.weight"][0].eq(0.5).all() and found["after"]["fc2.bias"].tolist() == list(range(10))
        assert torch.equal(found["doubled"], 2 * found["moment"]) and found["moment"].abs().sum() > 0
        assert found["sharded"] == (stage == 3)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_full_gradients(ranks, stage, accumulation):
    model = scripts.build()
    x, y = scripts.data(0)
    F.cross_entropy(model(x), y).backward()
    for found in ranks(2).run(scripts.gradients, stage=stage, accumulation=accumulation):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found["grads"][name], parameter.grad)
        assert found["early"] is None and found["late"] is None


def held_in_a_loss(process, *, stage: int) -> dict[str, torch.Tensor]:
    """A loss made of the weights themselves, outside of any forward; its backward comes when they are released, and others were gathered."""
    engine, *_ = deepspeed.initialize(model=scripts.build(), config=scripts.config(stage=stage))
    first, second = engine.module.fc1, engine.module.fc2
    x, y = scripts.data(0)
    with deepspeed.zero.GatheredParameters([first.weight, first.bias, second.weight, second.bias]):
        loss = F.cross_entropy(F.relu(x @ first.weight.t() + first.bias) @ second.weight.t() + second.bias, y)
    with torch.no_grad():
        engine(2 * x)
    engine.backward(loss)
    found = {name: deepspeed.safe_get_full_grad(parameter) for name, parameter in engine.module.named_parameters()}
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_loss_of_gathered_parameters_is_differentiated_after_their_release(ranks, stage):
    model = scripts.build()
    x, y = scripts.data(0)
    F.cross_entropy(model(x), y).backward()
    found = ranks(2).run(held_in_a_loss, stage=stage)[0]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def test_parameters_of_no_engine_are_full_anyway():
    parameter = torch.nn.Parameter(torch.ones(3))
    with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
        assert parameter.sum() == 3
    assert deepspeed.safe_get_full_fp32_param(parameter) is None
    with pytest.raises(ValueError, match="belongs to no engine"):
        deepspeed.safe_set_full_fp32_param(parameter, torch.zeros(3))
