"""Forward, backward, step: the one engine behind every door."""

from ztk.engine.control import StepControl, StepMetrics
from ztk.engine.engine import Engine

__all__ = ["Engine", "StepControl", "StepMetrics"]
