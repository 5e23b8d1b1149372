"""In which dtypes a model computes and sums, and how its loss is scaled."""

from ztk.policies.loss_scale import LossScalePolicy
from ztk.precision.control import control_settings, control_state
from ztk.precision.policy import PrecisionPolicy

__all__ = ["LossScalePolicy", "PrecisionPolicy", "control_settings", "control_state"]
