"""`deepspeed.runtime.fp16.loss_scaler`: loss scales for custom loops, and a read-only view of the engine's.

The engine updates its scale on the device (`ztk.kernels.step_control`); `optimizer.loss_scaler` is the view. Results have the dtype of
their inputs.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from ztk.deepspeed.saved.types import module_is
from ztk.deepspeed.tools.log import log_dist
from ztk.train.engine import Engine

_MODULE = "deepspeed.runtime.fp16.loss_scaler"


@module_is(_MODULE)
class LossScalerBase:
    """A loss scale, `cur_scale`. `dynamic`: whether `update_scale` changes it."""

    dynamic = False

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = cur_scale

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def scale_gradient(self, module: object, grad_in: Iterable[Tensor], grad_out: object) -> tuple[Tensor, ...]:
        """Returns `grad_in`, tensors of any shape, times the scale, as a module's backward hook."""
        return tuple(self.loss_scale * gradient for gradient in grad_in)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Returns the loss, a scalar, times the scale."""
        return loss * self.loss_scale

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Runs the backward of the scaled loss, a scalar."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)

    def update_scale(self, overflow: bool) -> None:
        """Updates the scale. Call it after every step, skipped or not."""
        if overflow:
            log_dist("a gradient was not finite: the step was skipped", ranks=[0])


@module_is(_MODULE)
class LossScaler(LossScalerBase):
    """A constant scale."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)


@module_is(_MODULE)
class DynamicLossScaler(LossScalerBase):
    """A scale that an overflow halves, and that doubles after `scale_window` steps without one.

    min_scale: lower bound.
    delayed_shift: number of overflows before it is halved (hysteresis). Growth restores the count; with consecutive_hysteresis, every
    step without an overflow does.

    The first step, and the first after an overflow, do not count. Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, section
    3.2.

    Raises ValueError unless init_scale, scale_window and delayed_shift are above 0.
    """

    dynamic = True

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        super().__init__(init_scale)
        for key, value in (
            ("init_scale", init_scale),
            ("scale_window", scale_window),
            ("delayed_shift", delayed_shift),
        ):
            if not value > 0:
                raise ValueError(f"{key}={value}: must be above 0")
        self.cur_iter, self.last_overflow_iter = 0, -1
        self.scale_factor = 2.0
        self.scale_window, self.min_scale = scale_window, min_scale
        self.delayed_shift = self.cur_hysteresis = delayed_shift
        self.consecutive_hysteresis, self.raise_error_at_min_scale = consecutive_hysteresis, raise_error_at_min_scale
        self.dtype = dtype

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """Returns whether a gradient of `params`, of any shape, on this rank is not finite. On a GPU this waits for the device."""
        return any(p.grad is not None and not bool(p.grad.isfinite().all()) for p in params)

    def update_scale(self, overflow: bool) -> None:
        """Updates the scale. Call it after every step, skipped or not.

        Raises FloatingPointError for an overflow at the smallest scale, unless this is disabled.
        """
        if overflow:
            self._back_off()
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            stable = self.cur_iter - self.last_overflow_iter - 1
            if stable > 0 and stable % self.scale_window == 0:
                self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1

    def _back_off(self) -> None:
        if self.cur_hysteresis > 1:
            self.cur_hysteresis -= 1
            log_dist(
                f"overflow at loss scale {self.cur_scale:g}: {self.cur_hysteresis} more until it halves", ranks=[0]
            )
            return
        if self.cur_scale == self.min_scale and self.raise_error_at_min_scale:
            raise FloatingPointError(
                f"overflow at the smallest loss scale, min_scale={self.min_scale:g}: no smaller scale can fix it; look for a "
                "NaN in the loss or the data, or use bf16"
            )
        following = max(self.cur_scale / self.scale_factor, self.min_scale)
        log_dist(f"overflow at loss scale {self.cur_scale:g}: now {following:g}", ranks=[0])
        self.cur_scale = following


class EngineLossScale(LossScalerBase):
    """A read-only view of an engine's loss scale, which changes with its steps. On a GPU reading waits for the device."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        scaling = engine.control.scaling
        self.dynamic = self.dynamic_loss_scale = scaling.dynamic
        self.scale_window, self.delayed_shift, self.min_scale = scaling.window, scaling.hysteresis, scaling.floor
        self.scale_factor = scaling.growth_factor

    @property
    def cur_iter(self) -> int:
        """Number of steps so far, including skipped ones."""
        return self._engine.global_steps

    @property
    def cur_scale(self) -> float:
        return float(self._engine.control.loss_scale)

    def update_scale(self, overflow: bool) -> None:
        """Raises RuntimeError: the engine's step updates the scale."""
        raise RuntimeError(
            "optimizer.loss_scaler.update_scale(): engine.step() updates the loss scale; leave the call out"
        )
