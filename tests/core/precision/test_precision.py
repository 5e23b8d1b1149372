"""Faults of precision policies, and a dynamic loss scale driven through step control."""

import pytest
import torch

from tests.core.precision.recorded import MARKS, SCALES
from ztk import kernels
from ztk.core.precision import LossScalePolicy, PrecisionPolicy, control_settings, control_state


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial": 0.0}, "precision.loss_scale.initial=0.0"),
        ({"initial": float("inf")}, "precision.loss_scale.initial=inf"),
        ({"window": 0}, "precision.loss_scale.window=0"),
        ({"hysteresis": 0}, "precision.loss_scale.hysteresis=0"),
        ({"floor": 0.0}, "precision.loss_scale.floor=0.0"),
        ({"growth_factor": 1.0}, "precision.loss_scale.growth_factor=1.0"),
        ({"backoff_factor": 1.0}, "precision.loss_scale.backoff_factor=1.0"),
        ({"floor": 8.0, "initial": 4.0}, "initial=4.0: must lie between precision.loss_scale.floor=8.0 and"),
        ({"maximum": 4.0}, "maximum=4.0"),
    ],
)
def test_loss_scale_faults(options, message):
    with pytest.raises(ValueError, match=message):
        LossScalePolicy(**options)


def test_precision_faults():
    with pytest.raises(ValueError, match="precision.dtype=torch.float64: must be one of fp32, bf16, fp16"):
        PrecisionPolicy(dtype=torch.float64)
    with pytest.raises(ValueError, match="precision.reduce_dtype=torch.int8"):
        PrecisionPolicy(reduce_dtype=torch.int8)
    with pytest.raises(ValueError, match="precision.dtype=fp8: must be one of"):
        PrecisionPolicy.named("fp8")
    with pytest.raises(
        ValueError, match="precision.float8=mx: must be one of rowwise, rowwise_with_gw_hp, rowwise_e5m2, or null"
    ):
        PrecisionPolicy.named("bf16", float8="mx")
    with pytest.raises(ValueError, match="precision.float8=rowwise: float8 products need bfloat16 .* these are fp32"):
        PrecisionPolicy(float8="rowwise")
    with pytest.raises(ValueError, match="precision.loss_scale=dynamic has no effect with precision.dtype=bf16"):
        PrecisionPolicy.named("bf16", loss_scale=LossScalePolicy())
    with pytest.raises(ValueError, match="precision.loss_scale=128.0 has no effect with precision.dtype=fp32"):
        PrecisionPolicy(loss_scale=LossScalePolicy(dynamic=False, initial=128.0))


def test_defaults_by_dtype():
    assert PrecisionPolicy.named("fp16").loss_scale == LossScalePolicy()
    assert PrecisionPolicy.named("bf16").loss_scale == PrecisionPolicy().loss_scale == LossScalePolicy.off()
    assert PrecisionPolicy.named("bf16").gradient_dtype is torch.bfloat16
    assert PrecisionPolicy.named("bf16", reduce_dtype="fp32").gradient_dtype is torch.float32


def test_settings_and_state_have_the_kernel_layout():
    policy = LossScalePolicy(
        initial=512.0, window=7, hysteresis=3, floor=2.0, growth_factor=4.0, backoff_factor=0.25, maximum=1024.0
    )
    settings = control_settings(policy, gradient_divisor=6, clip_grad_norm=1.5)
    assert settings.dtype == torch.float32 and settings.numel() == kernels.SETTINGS_SIZE
    expected = {
        "gradient_divisor": 6, "max_norm": 1.5, "dynamic": 1, "growth_factor": 4, "backoff_factor": 0.25,
        "growth_interval": 7, "hysteresis": 3, "min_scale": 2, "max_scale": 1024, "consecutive_hysteresis": 0,
    }  # fmt: skip
    assert {setting.name: settings[setting].item() for setting in kernels.Setting} == expected
    state = control_state(policy)
    assert {entry.name: state[entry].item() for entry in kernels.State if state[entry]} == {
        "loss_scale": 512.0,
        "good_steps": -1.0,
        "hysteresis_left": 3.0,
    }


@pytest.mark.parametrize("window, hysteresis, consecutive", SCALES)
def test_scale_moves_as_in_deepspeed(window, hysteresis, consecutive):
    policy = LossScalePolicy(initial=256.0, window=window, hysteresis=hysteresis, consecutive_hysteresis=consecutive)
    state, settings = control_state(policy), control_settings(policy, gradient_divisor=1)
    control, hyper = torch.zeros(1, kernels.CONTROL_COLUMNS), torch.zeros(1, kernels.HYPER_COLUMNS)
    scales = []
    for mark in MARKS:
        sumsq = torch.tensor([float("nan") if mark == "x" else 1.0], dtype=torch.float64)
        kernels.step_control(
            state, sumsq=sumsq, hyper=hyper, lr_table=torch.ones(1), control=control, settings=settings
        )
        scales.append(state[kernels.State.loss_scale].item())
        assert bool(control[0, kernels.Control.skip]) == (mark == "x")
    assert scales == SCALES[window, hysteresis, consecutive]
    assert state[kernels.State.skipped_steps] == MARKS.count("x")
    assert state[kernels.State.step] == MARKS.count(".")


def test_static_scale_stays():
    policy = LossScalePolicy(dynamic=False, initial=8.0)
    state, settings = control_state(policy), control_settings(policy, gradient_divisor=1)
    control, hyper = torch.zeros(1, kernels.CONTROL_COLUMNS), torch.zeros(1, kernels.HYPER_COLUMNS)
    for sumsq in (1.0, float("inf"), 1.0):
        kernels.step_control(
            state,
            sumsq=torch.tensor([sumsq], dtype=torch.float64),
            hyper=hyper,
            lr_table=torch.ones(1),
            control=control,
            settings=settings,
        )
    assert state[kernels.State.loss_scale] == 8.0
