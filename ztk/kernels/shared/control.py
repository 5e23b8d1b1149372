"""Columns of the small device tables that carry an optimizer step's scalars."""

from enum import IntEnum

import triton.language as tl

HYPER_COLUMNS = 8
STATE_SIZE = 8
CONTROL_COLUMNS = 16
SETTINGS_SIZE = 16


class Hyper(IntEnum):
    """Columns of `hyper` float32 [groups, 8]: the hyperparameters of a parameter group."""

    lr = 0
    beta1 = 1
    beta2 = 2
    eps = 3
    weight_decay = 4
    momentum = 5
    uncorrected = 6  # not 0: Adam's averages are used as they are


class State(IntEnum):
    """Entries of `state` float32 [8]: values that persist between steps."""

    step = 0  # optimizer steps taken; exact up to 2^24
    loss_scale = 1
    good_steps = 2  # since the last growth; -1 at the start and after an overflow
    hysteresis_left = 3
    skipped_steps = 4
    found_inf = 5  # 1 when the last step was skipped
    grad_norm = 6  # of the last step: unscaled, averaged, before clipping


class Control(IntEnum):
    """Columns of `control` float32 [groups, 16]: the inputs of an optimizer kernel."""

    skip = 0
    grad_coefficient = 1  # unscale, average and clip in one factor
    lr = 2
    beta1 = 3
    beta2 = 4
    eps = 5
    weight_decay = 6
    momentum = 7
    bias_correction1 = 8  # 1 - beta1^step
    bias_correction2_sqrt = 9  # sqrt(1 - beta2^step)
    step = 10  # the step being taken, counted from 1; seeds stochastic rounding


# Columns of Control for kernels, which read constexprs only
SKIP = tl.constexpr(int(Control.skip))
COEFFICIENT = tl.constexpr(int(Control.grad_coefficient))
LR = tl.constexpr(int(Control.lr))
BETA1 = tl.constexpr(int(Control.beta1))
BETA2 = tl.constexpr(int(Control.beta2))
EPS = tl.constexpr(int(Control.eps))
WEIGHT_DECAY = tl.constexpr(int(Control.weight_decay))
MOMENTUM = tl.constexpr(int(Control.momentum))
BIAS1 = tl.constexpr(int(Control.bias_correction1))
BIAS2 = tl.constexpr(int(Control.bias_correction2_sqrt))
STEP = tl.constexpr(int(Control.step))


class Setting(IntEnum):
    """Entries of `settings` float32 [16]: the constants of step control."""

    gradient_divisor = 0  # data-parallel size times accumulation steps
    max_norm = 1  # 0: no clipping
    dynamic = 2  # 1: the loss scale grows and backs off
    growth_factor = 3
    backoff_factor = 4
    growth_interval = 5  # good steps before the scale grows
    hysteresis = 6  # overflows before the scale backs off
    min_scale = 7
    max_scale = 8
    consecutive_hysteresis = 9  # 1: any good step refills the hysteresis (apex); 0: only a growth does (DeepSpeed)
