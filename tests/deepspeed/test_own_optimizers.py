"""Optimizers by DeepSpeed's classes: taken over by the engine, and stepping by themselves."""

import functools

import pytest
import torch

from tests.deepspeed.scripts import config, plain, train
from ztk.deepspeed.optimizers.own import DeepSpeedCPUAdam, DeepSpeedCPULion, FusedAdam, FusedLion

LR, DECAY = 1e-2, 0.1
ADAMW = functools.partial(torch.optim.AdamW, lr=LR, weight_decay=DECAY)
ADAM = functools.partial(torch.optim.Adam, lr=LR, weight_decay=DECAY)
LION = functools.partial(FusedLion, lr=1e-3, weight_decay=DECAY)


@pytest.mark.parametrize(
    ("make", "like", "offload"),
    [
        (functools.partial(FusedAdam, lr=LR, weight_decay=DECAY), ADAMW, "none"),
        (functools.partial(FusedAdam, lr=LR, weight_decay=DECAY, adam_w_mode=False), ADAM, "none"),
        (functools.partial(DeepSpeedCPUAdam, lr=LR, weight_decay=DECAY), ADAMW, "cpu"),
        (functools.partial(DeepSpeedCPUAdam, lr=LR, weight_decay=DECAY, adamw_mode=False), ADAM, "cpu"),
        (functools.partial(DeepSpeedCPULion, lr=1e-3, weight_decay=DECAY), LION, "cpu"),
    ],
)
def test_the_engine_runs_them(ranks, make, like, offload):
    """As a plain loop with the optimizer of the same formula; within 1e-5, as rounding of sums in another order allows."""
    zero = {"offload_optimizer": {"device": offload}}
    found = ranks(2).run(train, ds_config=config(stage=2, optimizer=None, zero=zero), optimizer=make)[0]
    losses, weights = plain(optimizer=like)
    assert found["losses"] == pytest.approx(losses, abs=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-5, atol=2e-5)


def test_lion_by_itself_is_the_papers():
    """Two steps by hand: betas 0.9 and 0.99, rate 0.1, decay 0.5."""
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = FusedLion([parameter], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    for gradient in ([1.0, -1.0], [-20.0, 3.0]):
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
    # 1 * 0.95 - 0.1 = 0.85, then c = 0.9 * 0.01 - 2 < 0: 0.85 * 0.95 + 0.1; -2 * 0.95 + 0.1 = -1.8, then c > 0: -1.71 - 0.1
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.9075, -1.81]))
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], torch.tensor([0.0099 - 0.2, -0.0099 + 0.03]))


def test_gradients_are_dropped_or_zeroed():
    for drops in (True, False):
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = FusedAdam([parameter], set_grad_none=drops)
        parameter.grad = torch.ones(2)
        optimizer.zero_grad()
        assert (parameter.grad is None) is drops


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda p: DeepSpeedCPUAdam(p, amsgrad=True), "amsgrad=True"),
        (lambda p: DeepSpeedCPULion(p, fp32_optimizer_states=False), "fp32_optimizer_states=False"),
    ],
)
def test_what_ztk_does_not_do_is_refused(make, part):
    with pytest.raises(ValueError, match=part):
        make([torch.nn.Parameter(torch.ones(1))])
