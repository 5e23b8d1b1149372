"""Dtypes of computation and reduction, and loss scaling."""

from ztk.core.policies.loss_scale import LossScalePolicy
from ztk.core.precision.control import control_settings, control_state
from ztk.core.precision.policy import PrecisionPolicy

__all__ = ["LossScalePolicy", "PrecisionPolicy", "control_settings", "control_state"]
