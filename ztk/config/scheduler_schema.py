"""Keys of the learning rate: see `ztk.config.schema`."""

from dataclasses import dataclass
from enum import StrEnum

from ztk.config.key import key


class SchedulerName(StrEnum):
    """scheduler.name: how the learning rate moves."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"
    one_cycle = "one_cycle"
    range_test = "range_test"


class WarmupShape(StrEnum):
    """scheduler.warmup_shape: how it rises."""

    linear = "linear"
    log = "log"


class DecayShape(StrEnum):
    """scheduler.decay_shape: how wsd decays."""

    linear = "linear"
    cosine = "cosine"
    sqrt = "sqrt"
    exponential = "exponential"


@dataclass(kw_only=True)
class SchedulerConfig:
    """The learning rate over the optimizer steps, as multiples of optimizer.lr."""

    name: SchedulerName = key("the schedule")
    warmup_steps: int | None = key(
        "steps in which the learning rate rises; null: a twentieth of train.steps", default=None
    )
    warmup_shape: WarmupShape | None = key("how it rises", default=None)
    warmup_start: float | None = key("first multiplier; null: 1 / warmup_steps", default=None)
    final: float | None = key("multiplier at the end", default=None)
    total_steps: int | None = key("step at which the decay ends; null: train.steps", default=None)
    decay_steps: int | None = key("steps of wsd's decay, the last ones; null: a tenth of the steps", default=None)
    decay_shape: DecayShape | None = key(
        "how wsd decays: linear; cosine: half a cosine; sqrt: 1 - square root, steep first; exponential: by the same factor per step",
        default=None,
    )
    start: float | None = key("lowest multiplier", default=None)
    rise_steps: int | None = key("steps up; null: half of train.steps", default=None)
    fall_steps: int | None = key("steps down; null: as rise_steps", default=None)
    rise_stairs: int | None = key("stairs on the way up; 0: a slope", default=None)
    fall_stairs: int | None = key("stairs on the way down; null: as rise_stairs", default=None)
    decay_rate: float | None = key(
        "after the cycle the rate is divided by 1 + decay_rate per decay_interval steps; 0: it is not", default=None
    )
    decay_interval: int | None = key("steps of that decay; 0: there is none", default=None)
    step_size: int | None = key(
        "steps in which the multiplier grows by step_rate; null: a tenth of train.steps", default=None
    )
    step_rate: float | None = key("growth of the multiplier in step_size steps", default=None)
    staircase: bool | None = key("grow in jumps of step_size", default=None)
