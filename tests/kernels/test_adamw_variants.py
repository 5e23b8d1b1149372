"""The AdamW variants with narrow state: same bits for every cut, unbiased rounding, no stalling."""

import pytest
import torch

from ztk.kernels import set_backend
from ztk.kernels.ops.adamw_8bit import adamw_8bit, decode_master, decode_moments, encode_master
from ztk.kernels.ops.adamw_bf16 import adamw_bf16
from ztk.kernels.ops.adamw_stochastic import adamw_stochastic
from ztk.kernels.shared.flat import control_row
from ztk.kernels.shared.rounding import random_bits_cpu, round_stochastic_bf16_cpu

N = 65536 * 2 + 4096 + 96
CUTS = {"halves": (N // 64 * 32,), "odd": (32, 96, 1056, 65536 - 32, 65536 + 64), "piece": (65536,)}


def state_bf16(n):
    g = torch.Generator().manual_seed(0)
    p, m, v = (torch.randn(n, generator=g) for _ in range(3))
    return {
        "master": p,
        "exp_avg": (m * 0.1).bfloat16(),
        "exp_avg_sq": v.square().bfloat16(),
        "out": torch.zeros(n, dtype=torch.bfloat16),
    }


def state_stochastic(n):
    state = state_bf16(n)
    return {"param": state["master"].bfloat16(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}


def state_8bit(n):
    g = torch.Generator().manual_seed(0)
    return {
        "param": torch.randn(n, generator=g).bfloat16(),
        "low": torch.randint(-128, 127, (n,), dtype=torch.int8, generator=g),
        "code_m": torch.randint(-127, 127, (n,), dtype=torch.int8, generator=g),
        "code_v": torch.randint(1, 255, (n,), dtype=torch.uint8, generator=g),
        "scale_m": torch.rand(-(-n // 32), generator=g).bfloat16(),
        "scale_v": (torch.rand(-(-n // 32), generator=g) + 0.1).bfloat16(),
    }


STEPS = {
    "bf16": (adamw_bf16, state_bf16),
    "stochastic": (adamw_stochastic, state_stochastic),
    "8bit": (adamw_8bit, state_8bit),
}


def step(op, state, *, grad, control, start=0):
    first, *rest = state
    op(state[first], grad=grad, control=control, start=start, seed=3, **{name: state[name] for name in rest})


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("op, make", STEPS.values(), ids=STEPS.keys())
def test_cuts_equal_the_full(op, make, dtype, cuts, threads):
    torch.set_num_threads(threads)
    full, parts = make(N), make(N)
    grad = torch.randn(N).to(dtype)
    step(op, full, grad=grad, control=control_row())
    borders = (0, *cuts, N)
    for start, stop in zip(borders, borders[1:], strict=False):
        views = {k: t[start // 32 : stop // 32] if k.startswith("scale") else t[start:stop] for k, t in parts.items()}
        step(op, views, grad=grad[start:stop], control=control_row(), start=start)
    torch.set_num_threads(1)
    for name, tensor in full.items():
        assert torch.equal(tensor, parts[name]), name


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("op, make", STEPS.values(), ids=STEPS.keys())
def test_skip_leaves_everything_untouched(op, make, backend):
    set_backend(backend)
    before, after = make(544), make(544)
    grad = torch.full((544,), float("nan"))
    step(op, after, grad=grad, control=control_row(skip=True, grad_coefficient=0.0))
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def check_bits_of_the_cpu(op, make, *, set_backend=set_backend):
    """Almost every rounding agrees: only a last-bit difference of the update can turn one."""
    states = []
    for backend in ("triton", "auto"):
        set_backend(backend)
        state = make(2048)
        step(op, state, grad=torch.linspace(-2, 2, 2048), control=control_row(step=5), start=(1 << 33) + 64)
        states.append(state)
    for name, tensor in states[0].items():
        if tensor.dtype != torch.float32:
            assert (tensor != states[1][name]).float().mean() < 0.01, name


@pytest.mark.parametrize("op, make", STEPS.values(), ids=STEPS.keys())
def test_kernel_draws_the_bits_of_the_cpu(op, make):
    check_bits_of_the_cpu(op, make)


def test_stochastic_rounding_is_unbiased_and_keeps_nan():
    x = torch.full((1 << 16,), 1.0 + 0.3 / 128)
    rounded = round_stochastic_bf16_cpu(x, random_bits_cpu(start=0, count=x.numel(), step=1, seed=0)).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 1 / 128}
    assert abs((rounded - x).mean().item()) < 4 * (0.3 * 0.7) ** 0.5 / 128 / 256  # four standard errors
    bad = torch.tensor([float("nan"), float("inf"), -float("inf")]).repeat(64)
    kept = round_stochastic_bf16_cpu(bad, random_bits_cpu(start=0, count=192, step=1, seed=0)).view(64, 3)
    assert kept[:, 0].isnan().all() and (kept[:, 1] == float("inf")).all() and (kept[:, 2] == -float("inf")).all()


def test_random_bits_differ_by_step_seed_and_index():
    draws = {
        tuple(random_bits_cpu(start=start, count=16, step=step, seed=seed).tolist())
        for start in (0, 16, 1 << 32)
        for step in (1, 2)
        for seed in (0, 1)
    }
    assert len(draws) == 12
    bits = random_bits_cpu(start=0, count=1 << 16, step=1, seed=0)
    for i in range(32):
        assert abs(((bits >> i) & 1).float().mean().item() - 0.5) < 0.01, f"bit {i}"


def test_split_master_keeps_sixteen_bits():
    master = torch.randn(4096) * torch.logspace(-6, 6, 4096)
    param, low = encode_master(master, random=torch.full((4096,), 128))
    back = decode_master(param, low=low)
    assert ((back - master).abs() <= 2.0**-16 * master.abs()).all()
    assert ((param.float() - master).abs() <= 2.0**-8 * master.abs()).all(), "param is the master, rounded"


def test_8bit_moments_follow_float32_moments():
    """Two hundred steps of one gradient distribution: decoded state near the exact one, steps bounded."""
    state = {name: torch.zeros_like(tensor) for name, tensor in state_8bit(1024).items()}
    m, v = torch.zeros(1024), torch.zeros(1024)
    generator = torch.Generator().manual_seed(0)
    for i in range(1, 201):
        grad = torch.randn(1024, generator=generator)
        control = control_row(step=i, grad_coefficient=1.0, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0)
        before = decode_master(state["param"], low=state["low"])
        step(adamw_8bit, state, grad=grad, control=control)
        assert (decode_master(state["param"], low=state["low"]) - before).abs().max() < 1.2e-2
        m.lerp_(grad, 0.1)
        v.lerp_(grad.square(), 0.01)
    decoded_m, decoded_v = decode_moments(**{k: state[k] for k in ("code_m", "code_v", "scale_m", "scale_v")})
    assert ((decoded_m - m).norm() / m.norm()) < 0.05
    assert ((decoded_v - v).norm() / v.norm()) < 0.05


@pytest.mark.parametrize("name", STEPS)
def test_tiny_updates_survive(name):
    """lr = 1e-5 on parameters of 1: to nearest, bfloat16 would never move (its step there is 4e-3)."""
    op, make = STEPS[name]
    state = {key: torch.zeros_like(tensor) for key, tensor in make(4096).items()}
    first = next(iter(state))
    state[first].fill_(1.0)
    for i in range(1, 101):
        step(op, state, grad=torch.ones(4096), control=control_row(step=i, lr=1e-5, weight_decay=0.0))
    master = decode_master(state["param"], low=state["low"]) if name == "8bit" else state[first].float()
    assert master.mean().item() == pytest.approx(1 - 100e-5, abs=1e-4)
