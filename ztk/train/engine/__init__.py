"""Forward, backward, step: the one engine behind the library, the command line and the DeepSpeed layer."""

from ztk.train.engine.control import StepControl, StepMetrics
from ztk.train.engine.engine import Engine

__all__ = ["Engine", "StepControl", "StepMetrics"]
