"""Applies the configuration's `Averaging` to an engine."""

from ztk.deepspeed.config import Settings
from ztk.train.engine import Engine


def set_averaging(engine: Engine, *, settings: Settings) -> None:
    """From the next backward on; called again when the number of micro-batches changes."""
    ranks = engine.process.mesh.comm("data").size
    averaging, accumulation = settings.averaging, settings.batch.accumulation
    engine.set_averaging(prescale=averaging.factor(ranks), divisor=averaging.divisor(ranks) * accumulation)
