"""The training engine: forward, backward, step. The library, the command line and the DeepSpeed layer all use it."""

from ztk.train.engine.control import StepControl, StepMetrics
from ztk.train.engine.engine import Engine

__all__ = ["Engine", "StepControl", "StepMetrics"]
