"""The scalars of a step: they are on the device, one small kernel decides, and the host reads them when it needs them.

They have the dtype fp32.
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
    """What the last step decided. `grad_norm` is that of the unscaled, averaged gradient before clipping; `lr` is the first group's."""

    grad_norm: float
    loss_scale: float
    lr: float
    skipped: bool
    updates: int  # optimizer steps that changed the parameters
    skipped_total: int


class StepControl:
    """Owns the control tensors: `state` [8] goes into checkpoints, `control` [groups, 16] is what optimizer kernels read."""

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
        self.row_of = groups.row_of  # of every trained parameter of the model, those of other ranks included
        self.control = torch.zeros(len(groups.rows), CONTROL_COLUMNS, dtype=torch.float32, device=device)
        self._settings = control_settings(
            loss_scale, gradient_divisor=gradient_divisor, clip_grad_norm=optimizer.clip_grad_norm, device=device
        )
        self.gradient_divisor = float(gradient_divisor)
        self._lr_table = (torch.ones(1) if lr_table is None else lr_table).to(device)
        self._scale_before = self.state[State.loss_scale].clone()

    @property
    def loss_scale(self) -> Tensor:
        """The factor on the loss, a device scalar []."""
        return self.state[State.loss_scale]

    def set_gradient_divisor(self, divisor: float) -> None:
        """What reduced gradients are larger by than the averaged one, from the next step on: usually data-parallel size times accumulation
        steps."""
        self.gradient_divisor = float(divisor)
        self._settings[Setting.gradient_divisor] = divisor

    def set_hyper(self, values: Tensor) -> None:
        """Sets the hyperparameters of all groups from the next step on, without waiting for the copy.

        values: fp32 on the host, in the shape of `hyper`.
        """
        # A copy is asynchronous only from pinned memory, which torch does not reuse before the copy has ended.
        self.hyper.copy_(values.pin_memory() if self.hyper.is_cuda else values, non_blocking=True)

    def decide(self, sum_of_squares: Tensor) -> None:
        """Skip or step, clip or not, grow or shrink the scale: fills `control` from the gradients' sum of squares, float64 [1]."""
        self._scale_before.copy_(self.loss_scale)
        kernels.step_control(
            self.state,
            sumsq=sum_of_squares,
            hyper=self.hyper,
            lr_table=self._lr_table,
            control=self.control,
            settings=self._settings,
        )

    def read(self) -> StepMetrics:
        """The scalars on the host. On a GPU this waits for the device."""
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
        """The value of the lr_table in the last step, on the host; 1 without a rate. On a GPU this waits for the device."""
        rate = float(self.hyper[0, Hyper.lr])
        return float(self.control[0, Control.lr]) / rate if rate else 1.0

    def overflow_status(self) -> Tensor:
        """Two device scalars [2]: was the gradient non-finite, and at which loss scale."""
        return torch.stack([self.state[State.found_inf], self._scale_before])

    def is_unrecoverable(self, overflow_status: Tensor) -> bool:
        """The gradient is not finite and no smaller loss scale can fix that. overflow_status: on the host [2]."""
        found, scale = overflow_status.tolist()
        return bool(found) and (not self.scaling.dynamic or scale <= self.scaling.floor)
