"""Ends the run for non-finite gradients that skipping steps cannot fix, and names the first parameter."""

import torch
from torch import Tensor

from ztk.core.runtime.planned import host_bytes, is_planned, note_read
from ztk.core.runtime.streams import Copy, is_capturing, start_copy
from ztk.train.engine.control import StepControl
from ztk.zero.parameters.released import was_read
from ztk.zero.zero import Zero


class OverflowGuard:
    """Looks at each step's overflow status: at once on the CPU, one step late on a GPU, so that the host never waits for the device.

    The unrecoverable step changed no parameter, so a late look loses only the name of the parameter, if the next batch is fine. The
    error names the step in any case. A step that is recorded into a CUDA graph is not looked at: its control kernel decides for itself to
    skip, and `read_metrics` shows it.
    """

    def __init__(self, control: StepControl, *, zero: Zero, device: torch.device) -> None:
        self._control, self._zero = control, zero
        self._seen = _host_memory(device)
        self._pending: Copy | None = None  # of the last status

    def check(self, *, step: int) -> None:
        """Called before the update, on all ranks. step: the number of this step. Raises FloatingPointError."""
        if self._seen is None:
            self._judge(self._control.overflow_status(), step=step)
            return
        if is_capturing(self._control.control):
            return
        pending, self._pending = self._pending, None  # first: after an error the next step begins anew
        note_read("overflow status of the step before")
        if pending is not None:
            pending.synchronize()
            self._judge(self._seen, step=step - 1)
        self._pending = start_copy(self._control.overflow_status(), out=self._seen)

    def finish(self, *, step: int) -> None:
        """The run ends after `step` steps: looks at the last overflow status. Raises FloatingPointError."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.synchronize()
            assert self._seen is not None
            if not self._seen.is_meta and self._control.is_unrecoverable(self._seen):
                raise FloatingPointError(
                    f"step {step - 1}, the last one: its gradient is not finite and changed nothing"
                )

    def _judge(self, overflow_status: Tensor, *, step: int, late: bool = False) -> None:
        if overflow_status.is_meta or not self._control.is_unrecoverable(overflow_status):  # a plan has no values
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
    """float32 [2]: where a status of `device` arrives late; None: it is looked at at once."""
    if is_planned(device):
        return host_bytes(2 * torch.float32.itemsize).view(torch.float32)
    return torch.zeros(2, pin_memory=True) if device.type == "cuda" else None
