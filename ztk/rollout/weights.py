"""How a rollout sees sharded parameters: gathered once for all its forwards, or a unit at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from ztk.engine import Engine


class RolloutWeights(StrEnum):
    """What memory the parameters of a rollout take at stage 3. Below it they are full in any case."""

    full = "full"  # gathered once and kept, as many as zero.max_live_parameters allows; a rollout moves each parameter once
    streamed = "streamed"  # gathered for every forward and released after it: the memory of training


@contextmanager
def rollout_weights(engine: Engine, *, weights: RolloutWeights) -> Iterator[None]:
    """Inside, the engine's module runs forwards without gradients, in eval mode. Every rank must enter."""
    with engine.evaluating():
        if weights is RolloutWeights.streamed:
            yield
        else:
            with engine.zero.gathering.keep_unsharded():
                yield
