"""Every optimizer, driven by its policies through step control, against a plain torch loop."""

import pytest
import torch

from ztk import kernels
from ztk.core.precision import LossScalePolicy, control_settings, control_state
from ztk.kernels.shared.flat import control_row
from ztk.optim import OptimizerPolicy, SchedulePolicy, eight_bit, flat_optimizer, group_parameters, lr_table

STEPS, N = 6, 48
CASES = {
    "adamw": OptimizerPolicy(name="adamw", lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, clip_grad_norm=1.0),
    "adam": OptimizerPolicy(name="adam", lr=0.02, weight_decay=0.1, clip_grad_norm=1.0),
    "sgd": OptimizerPolicy(name="sgd", lr=0.1, weight_decay=0.1),
    "momentum": OptimizerPolicy(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.1, clip_grad_norm=1.0),
    "nesterov": OptimizerPolicy(name="sgd", lr=0.1, momentum=0.9, nesterov=True),
    "lion": OptimizerPolicy(name="lion", lr=0.01, weight_decay=0.1),
}
STATES = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "nesterov": ("momentum_buffer",),
    "lion": ("exp_avg",),
}


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2"""

    def __init__(self, params, *, lr, betas, weight_decay):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                beta1, beta2 = group["betas"]
                update = (beta1 * momentum + (1 - beta1) * p.grad).sign() + group["weight_decay"] * p.data
                p.data -= group["lr"] * update
                momentum.mul_(beta2).add_(p.grad, alpha=1 - beta2)


def torch_optimizer(policy: OptimizerPolicy, parameter: torch.Tensor) -> torch.optim.Optimizer:
    match policy.name:
        case "adamw" | "adam":
            kind = torch.optim.AdamW if policy.name == "adamw" else torch.optim.Adam
            return kind([parameter], lr=policy.lr, betas=policy.betas, eps=policy.eps, weight_decay=policy.weight_decay)
        case "sgd":
            options = {"momentum": policy.momentum, "nesterov": policy.nesterov, "weight_decay": policy.weight_decay}
            return torch.optim.SGD([parameter], lr=policy.lr, **options)
    return Lion([parameter], lr=policy.lr, betas=policy.betas, weight_decay=policy.weight_decay)


@pytest.mark.parametrize("case", CASES)
def test_like_torch(case):
    policy = CASES[case]
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(N, generator=generator)
    grads = [torch.randn(N, generator=generator) for _ in range(STEPS)]
    schedule = lr_table(SchedulePolicy(name="linear", warmup_steps=2), steps=STEPS)
    divisor, scale = 4, 1024.0

    optimizer = flat_optimizer(policy)
    assert optimizer.state_names == STATES[case]
    scaling = LossScalePolicy(initial=scale)
    state, settings = (
        control_state(scaling),
        control_settings(scaling, gradient_divisor=divisor, clip_grad_norm=policy.clip_grad_norm),
    )
    hyper = group_parameters(policy, shapes={"w": (6, 8)}).hyper()
    control = torch.zeros(1, kernels.CONTROL_COLUMNS)
    master, out = start.clone(), torch.empty(N, dtype=torch.bfloat16)
    states = tuple(torch.zeros(N) for _ in optimizer.state_names)

    reference = start.clone().requires_grad_()
    plain = torch_optimizer(policy, reference)
    for step, grad in enumerate(grads):
        scaled = grad * divisor * scale
        sumsq = kernels.sum_of_squares(scaled)
        kernels.step_control(state, sumsq=sumsq, hyper=hyper, lr_table=schedule, control=control, settings=settings)
        optimizer.step(master, grad=scaled, states=states, control=control[0], out=out)

        reference.grad = grad.clone()
        if policy.clip_grad_norm:
            torch.nn.utils.clip_grad_norm_([reference], policy.clip_grad_norm)
        plain.param_groups[0]["lr"] = policy.lr * schedule[step].item()
        plain.step()
    # A handful of float32 roundings per step in another order
    torch.testing.assert_close(master, reference.detach(), rtol=0, atol=STEPS * 8 * torch.finfo(torch.float32).eps * 4)
    assert torch.equal(out, master.bfloat16())


@pytest.mark.parametrize("case", CASES)
def test_overflow_touches_nothing(case):
    policy, scaling = CASES[case], LossScalePolicy(initial=4.0, hysteresis=1)
    optimizer = flat_optimizer(policy)
    state = control_state(scaling)
    control = torch.zeros(1, kernels.CONTROL_COLUMNS)
    master, out = torch.ones(N), torch.full((N,), 7.0, dtype=torch.bfloat16)
    states = tuple(torch.full((N,), 0.5) for _ in optimizer.state_names)
    grad = torch.full((N,), float("inf"))
    kernels.step_control(
        state,
        sumsq=kernels.sum_of_squares(grad),
        hyper=group_parameters(policy, shapes={"w": (6, 8)}).hyper(),
        lr_table=torch.ones(1),
        control=control,
        settings=control_settings(scaling, gradient_divisor=1),
    )
    optimizer.step(master, grad=grad, states=states, control=control[0], out=out)
    assert (master == 1).all() and (out == 7).all() and all((s == 0.5).all() for s in states)
    assert state[kernels.State.loss_scale] == 2.0 and state[kernels.State.skipped_steps] == 1


def eight_bit_states(n: int, *, steps: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A parameter and its rows after updates whose sizes differ by group, some so small that float32 has few bits for them."""
    dtypes = {"low": torch.int8, "code_m": torch.int8, "code_v": torch.uint8}
    rows = {name: torch.zeros(n, dtype=dtype) for name, dtype in dtypes.items()}
    rows |= {name: torch.zeros(n // 32, dtype=torch.bfloat16) for name in ("scale_m", "scale_v")}
    parameter = torch.randn(n).bfloat16()
    scale = 10.0 ** torch.randint(-24, 3, (n // 32, 1))
    for step in range(1, steps + 1):
        grad = (torch.randn(n // 32, 32) * scale * (torch.rand(n // 32, 32) < 0.3)).view(-1)
        kernels.adamw_8bit(parameter, grad=grad, control=control_row(step=step), seed=3, start=0, **rows)
    return parameter, rows


@pytest.mark.parametrize("steps", [1, 30])
def test_8_bit_states_decode_and_encode_to_themselves(steps):
    parameter, rows = eight_bit_states(32 * 500, steps=steps)
    moments, master = eight_bit.read_moments(rows), eight_bit.read_master(parameter, rows=rows)
    again = {name: torch.zeros_like(row) for name, row in rows.items()}
    assert eight_bit.write_moments(again, **moments) == 0
    for name, value in eight_bit.read_moments(again).items():
        assert torch.equal(value, moments[name])
    high, low = eight_bit.split(master)
    assert torch.equal(high, parameter) and torch.equal(low, rows["low"])
    assert torch.equal(master.bfloat16(), parameter) and (rows["low"] == -128).any()


def test_moments_of_another_format_are_rounded_and_counted():
    _, rows = eight_bit_states(64, steps=1)
    assert eight_bit.write_moments(rows, exp_avg=torch.randn(64), exp_avg_sq=torch.rand(64)) == 4
