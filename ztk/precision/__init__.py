"""In which dtypes a model computes and sums, and how its loss is scaled."""

from ztk.precision.control import control_settings, control_state
from ztk.precision.policy import LossScalePolicy, PrecisionPolicy

__all__ = ["LossScalePolicy", "PrecisionPolicy", "control_settings", "control_state"]
