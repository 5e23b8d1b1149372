"""Step control: overflow, clipping, learning rate, bias corrections and loss scale, decided on the device.

    found_inf        = sumsq is not finite (one non-finite gradient anywhere makes the global sum so)
    grad_norm        = sqrt(sumsq) / (loss_scale * gradient_divisor)
    grad_coefficient = min(1, max_norm / (grad_norm + 1e-6)) / (loss_scale * gradient_divisor)
    lr               = hyper.lr * lr_table[min(step, len - 1)]            (step before this one)
    bias_correction  = 1 - beta^(step + 1), by repeated squaring in float64: float32 loses 1 - 0.999; 1 where hyper.uncorrected is set

A step with found_inf advances neither step nor lr. The loss scale follows DeepSpeed's DynamicLossScaler and apex's
update_scale_hysteresis.cu: an overflow uses up one unit of hysteresis, and when none is left multiplies the scale by
`backoff_factor`, not below `min_scale`; `growth_interval` good steps in a row multiply it by `growth_factor`, not above
`max_scale`. The first good step of a run and the first one after an overflow do not count, as in DeepSpeed: `good_steps`
is -1 then, in a fresh state (`ztk.core.precision.control_state`) too.
Nothing is read by the host, so a full training step can be captured in a CUDA graph.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.grids import next_power_of_2
from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.library import register, use_reference
from ztk.kernels.shared.control import (
    CONTROL_COLUMNS,
    HYPER_COLUMNS,
    SETTINGS_SIZE,
    STATE_SIZE,
    Control,
    Setting,
    State,
)
from ztk.kernels.shared.spec import OpSpec

NORM_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_

_STEP = tl.constexpr(int(State.step))
_LOSS_SCALE = tl.constexpr(int(State.loss_scale))
_GOOD_STEPS = tl.constexpr(int(State.good_steps))
_HYSTERESIS_LEFT = tl.constexpr(int(State.hysteresis_left))
_SKIPPED_STEPS = tl.constexpr(int(State.skipped_steps))
_FOUND_INF = tl.constexpr(int(State.found_inf))
_GRAD_NORM = tl.constexpr(int(State.grad_norm))
_S_DIVISOR = tl.constexpr(int(Setting.gradient_divisor))
_S_MAX_NORM = tl.constexpr(int(Setting.max_norm))
_S_DYNAMIC = tl.constexpr(int(Setting.dynamic))
_S_GROWTH_FACTOR = tl.constexpr(int(Setting.growth_factor))
_S_BACKOFF_FACTOR = tl.constexpr(int(Setting.backoff_factor))
_S_GROWTH_INTERVAL = tl.constexpr(int(Setting.growth_interval))
_S_HYSTERESIS = tl.constexpr(int(Setting.hysteresis))
_S_MIN_SCALE = tl.constexpr(int(Setting.min_scale))
_S_MAX_SCALE = tl.constexpr(int(Setting.max_scale))
_S_CONSECUTIVE = tl.constexpr(int(Setting.consecutive_hysteresis))
_NORM_EPS = tl.constexpr(NORM_EPS)
_INF = tl.constexpr(float("inf"))


@triton.jit
def _one_minus_power(b_beta, step):
    """1 - beta^step in float64, step a positive int32 below 2^25"""
    b_base = b_beta.to(tl.float64)
    b_power = b_base * 0.0 + 1.0
    exponent = step
    for _ in tl.static_range(25):
        b_power = tl.where(exponent % 2 == 1, b_power * b_base, b_power)
        b_base = b_base * b_base
        exponent = exponent // 2
    return 1.0 - b_power


@jit(do_not_specialize=["G", "table_size"])
def _step_control(
    state_ptr, sumsq_ptr, hyper_ptr, lr_table_ptr, control_ptr, settings_ptr, G, table_size, BLOCK_G: tl.constexpr
):
    """The module docstring's formulas; one program."""
    # Phase 1: read everything before anything is written
    step = tl.load(state_ptr + _STEP)
    loss_scale = tl.load(state_ptr + _LOSS_SCALE)
    good_steps = tl.load(state_ptr + _GOOD_STEPS)
    hysteresis_left = tl.load(state_ptr + _HYSTERESIS_LEFT)
    skipped_steps = tl.load(state_ptr + _SKIPPED_STEPS)
    sumsq = tl.load(sumsq_ptr)
    divisor = tl.load(settings_ptr + _S_DIVISOR)
    max_norm = tl.load(settings_ptr + _S_MAX_NORM)
    dynamic = tl.load(settings_ptr + _S_DYNAMIC)
    growth_factor = tl.load(settings_ptr + _S_GROWTH_FACTOR)
    backoff_factor = tl.load(settings_ptr + _S_BACKOFF_FACTOR)
    growth_interval = tl.load(settings_ptr + _S_GROWTH_INTERVAL)
    hysteresis = tl.load(settings_ptr + _S_HYSTERESIS)
    min_scale = tl.load(settings_ptr + _S_MIN_SCALE)
    max_scale = tl.load(settings_ptr + _S_MAX_SCALE)
    consecutive = tl.load(settings_ptr + _S_CONSECUTIVE)

    # Phase 2: the gradient's norm, overflow and the coefficient that unscales, averages and clips
    found_inf = (tl.abs(sumsq) < _INF) == 0  # NaN compares false
    inverse = 1.0 / (loss_scale.to(tl.float64) * divisor)
    norm = tl.sqrt(sumsq) * inverse
    clip = tl.where(max_norm > 0.0, max_norm / (norm + _NORM_EPS), 1.0)
    coefficient = tl.where(found_inf, 0.0, inverse * tl.where(clip < 1.0, clip, 1.0)).to(tl.float32)

    # Phase 3: one control row per parameter group
    o_g = tl.arange(0, BLOCK_G)
    m_g = o_g < G
    p_hyper = hyper_ptr + o_g * 8
    p_control = control_ptr + o_g * 16
    this_step = step.to(tl.int32) + 1
    index = tl.minimum(step.to(tl.int32), table_size - 1)
    b_lr = tl.load(p_hyper + 0, mask=m_g, other=0.0) * tl.load(lr_table_ptr + index)
    b_beta1 = tl.load(p_hyper + 1, mask=m_g, other=0.0)
    b_beta2 = tl.load(p_hyper + 2, mask=m_g, other=0.0)
    b_zero = b_beta1 * 0.0
    tl.store(p_control + 0, b_zero + found_inf.to(tl.float32), mask=m_g)
    tl.store(p_control + 1, b_zero + coefficient, mask=m_g)
    tl.store(p_control + 2, b_lr, mask=m_g)
    tl.store(p_control + 3, b_beta1, mask=m_g)
    tl.store(p_control + 4, b_beta2, mask=m_g)
    tl.store(p_control + 5, tl.load(p_hyper + 3, mask=m_g, other=0.0), mask=m_g)
    tl.store(p_control + 6, tl.load(p_hyper + 4, mask=m_g, other=0.0), mask=m_g)
    tl.store(p_control + 7, tl.load(p_hyper + 5, mask=m_g, other=0.0), mask=m_g)
    m_plain = tl.load(p_hyper + 6, mask=m_g, other=0.0) != 0.0
    b_correction1 = _one_minus_power(b_beta1, this_step).to(tl.float32)
    b_correction2 = tl.sqrt(_one_minus_power(b_beta2, this_step).to(tl.float32))
    tl.store(p_control + 8, tl.where(m_plain, 1.0, b_correction1), mask=m_g)
    tl.store(p_control + 9, tl.where(m_plain, 1.0, b_correction2), mask=m_g)
    tl.store(p_control + 10, b_zero + this_step.to(tl.float32), mask=m_g)

    # Phase 4: counters and the next loss scale
    backed_off = tl.where(hysteresis_left <= 1.0, tl.maximum(loss_scale * backoff_factor, min_scale), loss_scale)
    left_after_inf = tl.where(hysteresis_left <= 1.0, hysteresis_left, hysteresis_left - 1.0)
    grows = good_steps + 1.0 >= growth_interval
    grown = tl.where(grows, tl.minimum(loss_scale * growth_factor, max_scale), loss_scale)
    left_after_good = tl.where(grows | (consecutive > 0.0), hysteresis, hysteresis_left)
    is_dynamic = dynamic > 0.0
    tl.store(state_ptr + _STEP, tl.where(found_inf, step, step + 1.0))
    tl.store(state_ptr + _LOSS_SCALE, tl.where(is_dynamic, tl.where(found_inf, backed_off, grown), loss_scale))
    tl.store(state_ptr + _GOOD_STEPS, tl.where(found_inf, -1.0, tl.where(grows & is_dynamic, 0.0, good_steps + 1.0)))
    next_left = tl.where(found_inf, left_after_inf, left_after_good)
    tl.store(state_ptr + _HYSTERESIS_LEFT, tl.where(is_dynamic, next_left, hysteresis_left))
    tl.store(state_ptr + _SKIPPED_STEPS, skipped_steps + found_inf.to(tl.float32))
    tl.store(state_ptr + _FOUND_INF, found_inf.to(tl.float32))
    tl.store(state_ptr + _GRAD_NORM, norm.to(tl.float32))


@kept
def _kernel_for(G: int, table_size: int) -> Bound:
    return bind(_step_control, G, table_size, grid=(1,), BLOCK_G=next_power_of_2(G), num_warps=1, enable_fp_fusion=True)


def _launch(state: Tensor, sumsq: Tensor, hyper: Tensor, lr_table: Tensor, control: Tensor, settings: Tensor) -> None:
    _kernel_for(hyper.shape[0], lr_table.numel()).launch(state, sumsq, hyper, lr_table, control, settings)


def step_control_reference(
    state: Tensor, *, sumsq: Tensor, hyper: Tensor, lr_table: Tensor, control: Tensor, settings: Tensor
) -> None:
    """The same decisions in Python's float64 arithmetic; reads and writes the tensors once each."""
    old, s = state.tolist(), settings.tolist()
    scale, sumsq_value = old[State.loss_scale], sumsq.item()
    divisor = s[Setting.gradient_divisor]

    found_inf = not math.isfinite(sumsq_value)
    inverse = 1.0 / (scale * divisor)
    norm = math.sqrt(sumsq_value) * inverse if not math.isnan(sumsq_value) else math.nan
    max_norm = s[Setting.max_norm]
    clip = max_norm / (norm + NORM_EPS) if max_norm > 0 else 1.0
    coefficient = 0.0 if found_inf else inverse * min(1.0, clip)

    this_step = int(old[State.step]) + 1
    multiplier = lr_table[min(this_step, lr_table.numel()) - 1].item()
    rows = []
    for lr, beta1, beta2, eps, weight_decay, momentum, uncorrected, _ in hyper.tolist():
        row = [0.0] * CONTROL_COLUMNS
        row[Control.skip] = float(found_inf)
        row[Control.grad_coefficient] = coefficient
        row[Control.lr] = lr * multiplier
        row[Control.beta1], row[Control.beta2], row[Control.eps] = beta1, beta2, eps
        row[Control.weight_decay], row[Control.momentum] = weight_decay, momentum
        row[Control.bias_correction1] = 1.0 if uncorrected else 1.0 - beta1**this_step
        row[Control.bias_correction2_sqrt] = 1.0 if uncorrected else math.sqrt(1.0 - beta2**this_step)
        row[Control.step] = this_step
        rows.append(row)
    control.copy_(torch.tensor(rows, dtype=torch.float32, device="cpu"))

    new = list(old)
    if s[Setting.dynamic] > 0:
        _update_loss_scale(new, settings=s, found_inf=found_inf)
    else:
        new[State.good_steps] = -1.0 if found_inf else old[State.good_steps] + 1
    new[State.step] = old[State.step] if found_inf else this_step
    new[State.skipped_steps] += found_inf
    new[State.found_inf] = float(found_inf)
    new[State.grad_norm] = norm
    state.copy_(torch.tensor(new, dtype=torch.float32, device="cpu"))


def _update_loss_scale(state: list[float], *, settings: list[float], found_inf: bool) -> None:
    """The loss scale, its good steps and its hysteresis, in place."""
    if found_inf:
        state[State.good_steps] = -1.0
        if state[State.hysteresis_left] > 1:
            state[State.hysteresis_left] -= 1
        else:
            shrunk = state[State.loss_scale] * settings[Setting.backoff_factor]
            state[State.loss_scale] = max(shrunk, settings[Setting.min_scale])
        return
    state[State.good_steps] += 1
    grows = state[State.good_steps] >= settings[Setting.growth_interval]
    if grows or settings[Setting.consecutive_hysteresis] > 0:
        state[State.hysteresis_left] = settings[Setting.hysteresis]
    if grows:
        state[State.good_steps] = 0.0
        grown = state[State.loss_scale] * settings[Setting.growth_factor]
        state[State.loss_scale] = min(grown, settings[Setting.max_scale])


def _cpu(state: Tensor, sumsq: Tensor, hyper: Tensor, lr_table: Tensor, control: Tensor, settings: Tensor) -> None:
    step_control_reference(state, sumsq=sumsq, hyper=hyper, lr_table=lr_table, control=control, settings=settings)


_op = register(
    "step_control(Tensor(a!) state, Tensor sumsq, Tensor hyper, Tensor lr_table, Tensor(b!) control, Tensor settings) -> ()",
    triton=_launch,
    cpu=_cpu,
    fake=lambda state, sumsq, hyper, lr_table, control, settings: None,
)


def step_control(
    state: Tensor, *, sumsq: Tensor, hyper: Tensor, lr_table: Tensor, control: Tensor, settings: Tensor
) -> None:
    """Decide one optimizer step on the device: writes `control` and advances `state`, both in place.

    All contiguous on one device, and float32 but for sumsq [1], float64, the global sum of squares of the scaled, summed gradients:
    state [8] (`State`), hyper [groups, 8] (`Hyper`), lr_table [steps] of learning-rate multipliers, control [groups, 16]
    (`Control`), settings [16] (`Setting`). Every data-parallel rank calls it with the same values and gets the same.

    Raises ValueError for other shapes and dtypes.
    """
    groups = hyper.shape[0]
    expected = {
        "state": (state, (STATE_SIZE,)),
        "sumsq": (sumsq, (1,)),
        "hyper": (hyper, (groups, HYPER_COLUMNS)),
        "lr_table": (lr_table, (lr_table.numel(),)),
        "control": (control, (groups, CONTROL_COLUMNS)),
        "settings": (settings, (SETTINGS_SIZE,)),
    }
    for name, (tensor, shape) in expected.items():
        dtype = torch.float64 if name == "sumsq" else torch.float32
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"step_control: {name} is {tuple(tensor.shape)} {tensor.dtype}; it must be contiguous {dtype} {shape}"
            )
    if lr_table.numel() == 0 or groups == 0:
        raise ValueError("step_control: lr_table and hyper need at least one row")
    if use_reference():
        step_control_reference(state, sumsq=sumsq, hyper=hyper, lr_table=lr_table, control=control, settings=settings)
    else:
        _op(state, sumsq, hyper, lr_table, control, settings)


def _make_inputs(
    shape: tuple[int, ...], *, dtype: torch.dtype, device: str, sumsq: float = 3.0, dynamic: bool = True
) -> dict[str, object]:
    (groups,) = shape
    row = [1e-3, 0.9, 0.999, 1e-8, 0.1, 0.9, 0.0, 0.0]
    hyper = torch.tensor([row] * groups) * torch.linspace(1.0, 0.9, groups)[:, None]
    settings = [4.0, 0.05, float(dynamic), 2.0, 0.5, 8.0, 2.0, 1.0, 2.0**24] + [0.0] * 7
    return {
        "state": torch.tensor([5.0, 2.0**10, 7.0, 1.0, 3.0, 0.0, 0.0, 0.0]).to(device),
        "sumsq": torch.tensor([sumsq], dtype=torch.float64).to(device),
        "hyper": hyper.to(device),
        "lr_table": torch.linspace(0.1, 1.0, 12).to(device),
        "control": torch.zeros(groups, CONTROL_COLUMNS).to(device),
        "settings": torch.tensor(settings).to(device),
    }


SPEC = OpSpec(
    name="step_control",
    op=step_control,
    reference=step_control_reference,
    make_inputs=_make_inputs,
    mutated=("state", "control"),
    small_shapes=((1,), (3,)),
    bench_shapes=((2,),),
    variants=({}, {"sumsq": float("inf")}, {"sumsq": 1e12}, {"sumsq": 1e52}, {"dynamic": False}),
    num_bytes=lambda shape, itemsize: shape[0] * 24 * 4 + 128,
    num_flops=lambda shape: shape[0] * 200,
    dtypes=(torch.float32,),
    interpreted_dtypes=(torch.float32,),
)
