"""The keys of the moving average of the weights, and where they act."""

from dataclasses import dataclass
from enum import StrEnum

from ztk.config.key import key
from ztk.core.policies.tier import Tier


class Evaluated(StrEnum):
    """train.evaluate: which weights held-out losses and the sample of text are of."""

    weights = "weights"  # those that train
    ema = "ema"  # their moving average


@dataclass(kw_only=True)
class EmaConfig:
    """An exponential moving average of the weights, in fp32 shards."""

    decay: float | None = key(
        "part of the average that an update leaves, such as 0.999; the rest is the new weights; null or 0: no average is kept",
        default=None,
    )
    every: int | None = key("optimizer steps between updates of the average", default=None)
    offload: Tier | None = key(
        "tier of the average: none (the device), cpu (main memory), nvme (files); null: as offload.optimizer",
        default=None,
    )
