"""The precision policy as the float32 tensors that `ztk.kernels.step_control` reads."""

import torch
from torch import Tensor

from ztk import kernels
from ztk.core.policies.loss_scale import LossScalePolicy


def control_state(policy: LossScalePolicy, *, device: torch.device | str = "cpu") -> Tensor:
    """Float32 [8], the state before the first step: step 0, the initial loss scale, full hysteresis, and -1 good steps because
    the first one does not count (`ztk.kernels.step_control`). Part of a checkpoint.
    """
    state = torch.zeros(kernels.STATE_SIZE, dtype=torch.float32)
    state[kernels.State.loss_scale] = policy.initial
    state[kernels.State.good_steps] = -1.0
    state[kernels.State.hysteresis_left] = policy.hysteresis
    return state.to(device)


def control_settings(
    policy: LossScalePolicy, *, gradient_divisor: int, clip_grad_norm: float = 0.0, device: torch.device | str = "cpu"
) -> Tensor:
    """Float32 [16], constant for a run.

    gradient_divisor: data-parallel size times accumulation steps, because gradients arrive summed over both.
    clip_grad_norm: upper bound of the norm of the averaged gradient, 0 for none.
    """
    values = {
        kernels.Setting.gradient_divisor: gradient_divisor,
        kernels.Setting.max_norm: clip_grad_norm,
        kernels.Setting.dynamic: policy.dynamic,
        kernels.Setting.growth_factor: policy.growth_factor,
        kernels.Setting.backoff_factor: policy.backoff_factor,
        kernels.Setting.growth_interval: policy.window,
        kernels.Setting.hysteresis: policy.hysteresis,
        kernels.Setting.min_scale: policy.floor,
        kernels.Setting.max_scale: policy.maximum,
        kernels.Setting.consecutive_hysteresis: policy.consecutive_hysteresis,
    }
    settings = torch.zeros(kernels.SETTINGS_SIZE, dtype=torch.float32)
    for setting, value in values.items():
        settings[setting] = value
    return settings.to(device)
