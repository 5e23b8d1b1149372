"""Applies the configuration's `Averaging` to an engine."""

from ztk.deepspeed.config import Settings
from ztk.train.engine import Engine


def set_averaging(engine: Engine, *, settings: Settings) -> None:
    """From the next backward on; called again when the number of micro-batches changes."""
    ranks = engine.process.mesh.comm("data").size
    engine.zero.reduction.prescale = settings.averaging.factor(ranks)
    engine.control.set_gradient_divisor(settings.averaging.divisor(ranks) * settings.batch.accumulation)
