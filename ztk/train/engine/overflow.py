"""Stops the run at a non-finite gradient that skipping steps cannot fix, and names the first such parameter."""

import torch
from torch import Tensor

from ztk.core.runtime.planned import host_bytes, is_planned, note_read
from ztk.core.runtime.streams import Copy, is_capturing, start_copy
from ztk.train.engine.control import StepControl
from ztk.zero.parameters.released import was_read
from ztk.zero.zero import Zero


class OverflowGuard:
    """Checks each step's overflow status: immediately on the CPU, one step late on a GPU, so that the host never waits for the device.

    An unrecoverable step changes no parameter, so the late check is safe. It may only fail to name the parameter, if the next batch is
    finite; the error always names the step. Steps recorded into a CUDA graph are not checked: the control kernel skips on its own, and
    `read_metrics` reports it.
    """

    def __init__(self, control: StepControl, *, zero: Zero, device: torch.device) -> None:
        self._control, self._zero = control, zero
        self._seen = _host_memory(device)
        self._pending: Copy | None = None  # the copy of the last status

    def check(self, *, step: int) -> None:
        """Checks before the update, on all ranks. step: number of this step. Raises FloatingPointError."""
        if self._seen is None:
            self._judge(self._control.overflow_status(), step=step)
            return
        if is_capturing(self._control.control):
            return
        pending, self._pending = self._pending, None  # cleared first, so that the next step starts clean after an error
        note_read("overflow status of the step before")
        if pending is not None:
            pending.synchronize()
            self._judge(self._seen, step=step - 1)
        self._pending = start_copy(self._control.overflow_status(), out=self._seen)

    def finish(self, *, step: int) -> None:
        """Checks the last overflow status at the end of a run of `step` steps. Raises FloatingPointError."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.synchronize()
            assert self._seen is not None
            if not self._seen.is_meta and self._control.is_unrecoverable(self._seen):
                raise FloatingPointError(f"step {step}, the last one: its gradient is not finite and changed nothing")

    def _judge(self, overflow_status: Tensor, *, step: int) -> None:
        if overflow_status.is_meta or not self._control.is_unrecoverable(
            overflow_status
        ):  # meta tensors of a plan have no values
            return
        name = self._zero.first_non_finite() or "a parameter (which one, the next batch no longer shows)"
        scaling = self._control.scaling
        if scaling.dynamic:
            reason = f"at the smallest loss scale (precision.loss_scale.floor={scaling.floor:g})"
            fix = "the model diverges or fp16 is too narrow for it: use precision=bf16, or a smaller optimizer.lr"
        else:
            reason = "and there is no dynamic loss scale that could fix it"
            fix = "look at the data and the loss of this step, or use a smaller optimizer.lr"
        if was_read():
            fix += "; the script has read parameters while they were released (zero stage 3), which are NaN: see the warning"
        raise FloatingPointError(f"step {step}: the gradient of {name} is not finite {reason}; {fix}")


def _host_memory(device: torch.device) -> Tensor | None:
    """Returns a pinned float32 [2] buffer for the late check, or None if `device` is checked immediately."""
    if is_planned(device):
        return host_bytes(2 * torch.float32.itemsize).view(torch.float32)
    return torch.zeros(2, pin_memory=True) if device.type == "cuda" else None
