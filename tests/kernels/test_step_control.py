"""Step control over many steps: loss scale, hysteresis, skipping, clipping, and the kernel against the reference."""

import math

import pytest
import torch

from ztk.kernels import Control, Setting, State, set_backend, step_control

GROUPS = 3


def make(**settings):
    """Tensors of a run of two groups; settings by name."""
    values = {
        "gradient_divisor": 4, "dynamic": 1, "growth_factor": 2, "backoff_factor": 0.5, "growth_interval": 3,
        "hysteresis": 2, "min_scale": 1, "max_scale": 2.0**20,
    } | settings  # fmt: skip
    table = torch.zeros(16)
    for name, value in values.items():
        table[Setting[name]] = value
    state = torch.zeros(8)
    state[State.loss_scale], state[State.hysteresis_left] = 1024.0, values["hysteresis"]
    state[State.good_steps] = -1.0
    rows = [
        [1e-3, 0.9, 0.999, 1e-8, 0.1, 0.0, 0.0, 0.0],
        [2e-3, 0.8, 0.95, 1e-6, 0.0, 0.9, 0.0, 0.0],
        [1e-3, 0.9, 0.99, 1e-8, 0.0, 0.0, 1.0, 0.0],
    ]
    hyper = torch.tensor(rows)  # the last one without bias correction
    return {
        "state": state,
        "hyper": hyper,
        "lr_table": torch.tensor([0.25, 0.5, 1.0]),
        "control": torch.full((GROUPS, 16), math.nan),
        "settings": table,
    }


def run(tensors, *, finite: str):
    """One step per letter of `finite`: "." good, "x" overflow. Returns the loss scale after each."""
    scales = []
    for letter in finite:
        sumsq = torch.tensor([1.0 if letter == "." else math.inf], dtype=torch.float64)
        step_control(tensors["state"], sumsq=sumsq, **{k: v for k, v in tensors.items() if k != "state"})
        scales.append(tensors["state"][State.loss_scale].item())
    return scales


@pytest.fixture(params=["auto", "triton", "reference"], autouse=True)
def backend(request):
    set_backend(request.param)


@pytest.mark.parametrize(
    "finite, consecutive, expected",
    [
        ("....", 0, [1024, 1024, 1024, 2048]),  # grows after three good steps that count; the first one does not
        (".......", 0, [1024, 1024, 1024, 2048, 2048, 2048, 4096]),  # after a growth every one counts
        # hysteresis takes the overflow, the window starts again after one step
        ("..x....", 0, [1024, 1024, 1024, 1024, 1024, 1024, 2048]),
        ("xx", 0, [1024, 512]),
        ("xxx", 0, [1024, 512, 256]),  # none left: every further overflow backs off
        ("x.x", 0, [1024, 1024, 512]),  # DeepSpeed: a good step does not refill
        ("x.x", 1, [1024, 1024, 1024]),  # apex: it does
        ("x....xx", 0, [1024, 1024, 1024, 1024, 2048, 2048, 1024]),  # a growth refills
    ],
)
def test_loss_scale_follows_the_window_and_the_hysteresis(finite, consecutive, expected):
    assert run(make(consecutive_hysteresis=consecutive), finite=finite) == expected


def test_loss_scale_keeps_its_bounds():
    assert run(make(min_scale=256, hysteresis=1), finite="xxxx") == [512, 256, 256, 256]
    assert run(make(max_scale=2048, growth_interval=1), finite="....") == [1024, 2048, 2048, 2048]


def test_static_scale_skips_and_stays():
    tensors = make(dynamic=0)
    assert run(tensors, finite=".x.") == [1024] * 3
    assert tensors["state"][State.step] == 2 and tensors["state"][State.skipped_steps] == 1


def test_skipped_step_advances_neither_step_nor_learning_rate():
    tensors = make()
    rates = []
    for letter in ".x.x..":
        run(tensors, finite=letter)
        rates.append(round(tensors["control"][0, Control.lr].item() / 1e-3, 6))
        assert tensors["control"][0, Control.skip] == (letter == "x")
        assert tensors["state"][State.found_inf] == (letter == "x")
    assert rates == [0.25, 0.5, 0.5, 1.0, 1.0, 1.0]  # the last entry of the table holds on
    assert tensors["state"][State.step] == 4 and tensors["state"][State.skipped_steps] == 2


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e9])
def test_coefficient_unscales_averages_and_clips(max_norm):
    tensors = make(max_norm=max_norm)
    sumsq = torch.tensor([(3.0 * 1024 * 4) ** 2], dtype=torch.float64)  # the averaged, unscaled norm is 3
    step_control(tensors["state"], sumsq=sumsq, **{k: v for k, v in tensors.items() if k != "state"})
    clip = min(1.0, max_norm / (3.0 + 1e-6)) if max_norm else 1.0
    assert tensors["state"][State.grad_norm].item() == pytest.approx(3.0)
    assert tensors["control"][1, Control.grad_coefficient].item() == pytest.approx(clip / (1024 * 4))


@pytest.mark.parametrize("step", [0, 1, 9, 999, 10**6])
def test_bias_corrections_are_exact(step):
    """float32 arithmetic would lose the digits of 1 - 0.999 and of long runs."""
    tensors = make()
    tensors["state"][State.step] = step
    run(tensors, finite=".")
    for row, hyper in zip(tensors["control"].tolist(), tensors["hyper"].tolist(), strict=True):
        first, second = (1.0, 1.0) if hyper[6] else (1 - hyper[1] ** (step + 1), math.sqrt(1 - hyper[2] ** (step + 1)))
        assert row[Control.bias_correction1] == pytest.approx(first, rel=1e-6)
        assert row[Control.bias_correction2_sqrt] == pytest.approx(second, rel=1e-6)
        assert row[Control.step] == step + 1


def test_nan_counts_as_overflow():
    tensors = make()
    sumsq = torch.tensor([math.nan], dtype=torch.float64)
    step_control(tensors["state"], sumsq=sumsq, **{k: v for k, v in tensors.items() if k != "state"})
    assert tensors["control"][0, Control.skip] == 1 and tensors["control"][0, Control.grad_coefficient] == 0


def test_wrong_shapes_are_named():
    tensors = make()
    tensors["settings"] = torch.zeros(4)
    with pytest.raises(ValueError, match="settings"):
        run(tensors, finite=".")
