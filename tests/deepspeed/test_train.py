"""Scripts written for DeepSpeed train on two ranks as a plain PyTorch loop does on the full batch."""

import functools

import pytest
import torch

from tests.deepspeed import scripts
from tests.deepspeed.scripts import config, plain, train
from ztk.deepspeed.optimizers.own import FusedLamb

STAGES = (0, 1, 2, 3)


def close(found: dict, expected: tuple, *, tolerance: float = 1e-5) -> None:
    losses, weights = expected
    assert found["losses"] == pytest.approx(losses, abs=tolerance)
    for name, value in weights.items():
        torch.testing.assert_close(found["weights"][name], value, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_stage_trains_as_plain_adamw(ranks, stage, accumulation):
    found = ranks(2).run(train, ds_config=config(stage=stage, accumulation=accumulation))[0]
    close(found, plain())
    assert found["global_steps"] == scripts.STEPS and found["micro_steps"] == scripts.STEPS * accumulation
    assert found["samples"] == scripts.STEPS * scripts.BATCH and found["skipped"] == 0


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.1)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def lamb(parameters):
    return FusedLamb(parameters, lr=1e-2, weight_decay=0.1, max_coeff=2.0)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1)


@pytest.mark.parametrize("make", [adam, sgd, adamw, lamb])
def test_a_torch_optimizer_is_taken_over(ranks, make):
    found = ranks(2).run(train, ds_config=config(stage=3, optimizer=None), optimizer=make)[0]
    close(found, plain(optimizer=make))


def grouped(model):
    return [
        {"params": [model.fc1.weight, model.fc2.weight], "weight_decay": 0.3},
        {"params": [model.fc1.bias, model.fc2.bias], "weight_decay": 0.0, "lr": 3e-2},
    ]


def test_groups_of_parameters(ranks):
    found = ranks(2).run(train, ds_config=config(stage=2), groups=grouped)[0]
    close(found, plain(groups=grouped, optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2)))
    assert found["lr"] == [1e-2, 3e-2]


NAMED = [
    ({"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1}}, functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)),
    ({"type": "adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}}, adam),
    ({"type": "RMSprop", "params": {"lr": 1e-3, "momentum": 0.5}}, functools.partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5)),
    ({"type": "Lamb", "params": {"lr": 1e-2, "weight_decay": 0.1, "max_coeff": 2.0}}, lamb),
    ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}}, sgd),
]  # fmt: skip


@pytest.mark.parametrize(("section", "make"), NAMED, ids=lambda value: value["type"] if isinstance(value, dict) else "")
def test_optimizers_by_name(ranks, section, make):
    found = ranks(2).run(train, ds_config=config(stage=1, optimizer=section))[0]
    close(found, plain(optimizer=make))


def test_lion_by_name_learns(ranks):
    section = {"type": "Lion", "params": {"lr": 3e-3}}
    losses = ranks(2).run(train, ds_config=config(stage=2, optimizer=section), steps=30, period=3)[0]["losses"]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def test_a_torch_scheduler_is_followed(ranks):
    found = ranks(2).run(train, ds_config=config(stage=3), scheduler=halving)[0]
    close(found, plain(scheduler=halving))
    assert found["lr"] == [1e-2 * 0.5**4]


def test_clipping_and_offloading(ranks):
    zero = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    found = ranks(2).run(train, ds_config=config(stage=3, gradient_clipping=0.1, zero=zero))[0]
    close(found, plain(clip=0.1))


@pytest.mark.parametrize("stage", [0, 3])
def test_bf16_learns(ranks, stage):
    found = ranks(2).run(train, ds_config=config(stage=stage, bf16={"enabled": True}), steps=30, period=3)[0]
    assert sum(found["losses"][-5:]) < 0.8 * sum(found["losses"][:5])


@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_without_the_loss_scale_is_refused(ranks, stage):
    """DeepSpeed raises, too. The refused backward leaves nothing: 16 gradients of 1 have the norm 4."""
    for message, norm in ranks(2).run(scripts.unscaled, stage=stage):
        assert "engine.scale(loss).backward()" in message
        assert norm == 4.0


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_whose_squares_overflow_are_clipped(ranks, stage):
    """1e30 is finite, its square is not in float32. The clipped gradients equal the gradients of a loss that is 2^20 times too large, up to a
    few roundings of float32 (6e-8) per step in gradients, which Adam's division amplifies where elements are small."""
    norms, weights = ranks(2).run(scripts.huge, stage=stage, factor=2.0**100)[0]
    small, expected = ranks(2).run(scripts.huge, stage=stage, factor=2.0**20)[0]
    assert norms == pytest.approx([norm * 2.0**80 for norm in small], rel=1e-6)
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)  # three steps move by 3e-2
