"""`deepspeed.runtime.fp16.loss_scaler`: the classes that DeepSpeed's checkpoints contain, and a read-only view of the engine's scale.

The engine updates its scale on the device (`ztk.kernels.step_control`); `optimizer.loss_scaler` is the view.
"""

from ztk.deepspeed.saved.types import module_is
from ztk.train.engine import Engine

_MODULE = "deepspeed.runtime.fp16.loss_scaler"


@module_is(_MODULE)
class LossScaler:
    """A constant scale in a checkpoint of DeepSpeed. torch.load fills in its attributes."""

    cur_scale: float

    @property
    def loss_scale(self) -> float:
        return self.cur_scale


@module_is(_MODULE)
class DynamicLossScaler(LossScaler):
    """A dynamic scale in a checkpoint of DeepSpeed."""


class EngineLossScale:
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

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        """Raises RuntimeError: the engine's step updates the scale."""
        raise RuntimeError(
            "optimizer.loss_scaler.update_scale(): engine.step() updates the loss scale; leave the call out"
        )
