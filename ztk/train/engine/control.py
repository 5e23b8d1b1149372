"""Control scalars of a step. They stay on the device, where a small kernel computes them; the host reads them only on demand.

All scalars are fp32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ztk import kernels
from ztk.core.precision import LossScalePolicy, control_settings, control_state
from ztk.kernels import CONTROL_COLUMNS, Control, Hyper, Setting, State
from ztk.optim import GroupTable, OptimizerPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """The outcome of the last step: `grad_norm` of the unscaled, averaged gradient before clipping, and `lr` of the first group."""

    grad_norm: float
    loss_scale: float
    lr: float
    skipped: bool
    updates: int  # optimizer steps that changed parameters; skipped steps do not count
    skipped_total: int


class StepControl:
    """Owns the control tensors: `state` [8], saved in checkpoints, and `control` [groups, 16], the input of the optimizer kernels."""

    def __init__(
        self,
        *,
        optimizer: OptimizerPolicy,
        groups: GroupTable,
        loss_scale: LossScalePolicy,
        lr_table: Tensor | None,
        gradient_divisor: int,
        device: torch.device,
    ) -> None:
        self.scaling = loss_scale
        self.state = control_state(loss_scale, device=device)
        self.hyper = groups.hyper(device=device)
        self.row_of = groups.row_of  # all trained parameters of the model, also those that only other ranks hold
        self.control = torch.zeros(len(groups.rows), CONTROL_COLUMNS, dtype=torch.float32, device=device)
        self._settings = control_settings(
            loss_scale, gradient_divisor=gradient_divisor, clip_grad_norm=optimizer.clip_grad_norm, device=device
        )
        self.gradient_divisor = float(gradient_divisor)
        table = (torch.ones(1) if lr_table is None else lr_table).to(device)
        self._lr_table, self._momentum = table, None
        if table.dim() == 2:
            self._lr_table, self._momentum = table[:, 0].contiguous(), table[:, 1].contiguous()
        self._momentum_column = Hyper.beta1 if optimizer.betas and optimizer.name != "muon" else Hyper.momentum
        self._scale_before = self.state[State.loss_scale].clone()

    @property
    def loss_scale(self) -> Tensor:
        """The factor on the loss, a device scalar []."""
        return self.state[State.loss_scale]

    def set_gradient_divisor(self, divisor: float) -> None:
        """Sets the factor between the reduced and the averaged gradient, from the next step on.

        Usually the data-parallel size times the accumulation steps.
        """
        self.gradient_divisor = float(divisor)
        self._settings[Setting.gradient_divisor] = divisor

    def set_hyper(self, values: Tensor) -> None:
        """Sets the hyperparameters of all groups from the next step on, without waiting for the copy.

        values: fp32 on the host, in the shape of `hyper`.
        """
        # Only copies from pinned memory are asynchronous. torch does not reuse the buffer before the copy has ended.
        self.hyper.copy_(values.pin_memory() if self.hyper.is_cuda else values, non_blocking=True)

    def decide(self, sum_of_squares: Tensor) -> None:
        """Fills `control` from the gradients' sum of squares, float64 [1]: skip or step, clip factor, next loss scale."""
        self._scale_before.copy_(self.loss_scale)
        if self._momentum is not None:
            update = self.state[State.step].long().clamp(max=len(self._momentum) - 1)
            self.hyper[:, self._momentum_column] = self._momentum[update]
        kernels.step_control(
            self.state,
            sumsq=sum_of_squares,
            hyper=self.hyper,
            lr_table=self._lr_table,
            control=self.control,
            settings=self._settings,
        )

    def decide_again(self, sum_of_squares: Tensor) -> None:
        """Fills `control` for gradients that the running step computes again, without counting a step. Raises FloatingPointError if they
        are not finite.
        """
        state = self.state.clone()
        self.decide(sum_of_squares)
        found = bool(self.state[State.found_inf])
        self.state.copy_(state)
        if found:
            raise FloatingPointError("the optimizer's closure gave a gradient that is not finite")

    def read(self) -> StepMetrics:
        """Copies the scalars to the host. On a GPU this waits for the device."""
        state, lr = self.state.tolist(), float(self.control[0, Control.lr])
        return StepMetrics(
            grad_norm=state[State.grad_norm],
            loss_scale=state[State.loss_scale],
            lr=lr,
            skipped=bool(state[State.found_inf]),
            updates=int(state[State.step]),
            skipped_total=int(state[State.skipped_steps]),
        )

    def read_multiplier(self) -> float:
        """Returns the last step's value of the lr_table, or 1 without a table. On a GPU this waits for the device."""
        rate = float(self.hyper[0, Hyper.lr])
        return float(self.control[0, Control.lr]) / rate if rate else 1.0

    def overflow_status(self) -> Tensor:
        """Two device scalars [2]: whether the gradient was non-finite, and the loss scale."""
        return torch.stack([self.state[State.found_inf], self._scale_before])

    def is_unrecoverable(self, overflow_status: Tensor) -> bool:
        """Returns whether the gradient is non-finite and no smaller loss scale can fix it. overflow_status: on the host [2]."""
        found, scale = overflow_status.tolist()
        return bool(found) and (not self.scaling.dynamic or scale <= self.scaling.floor)
