"""Whether an exponential moving average of the weights is kept."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ztk.core.policies.key import Changes, When, key, key_faults, section
from ztk.core.policies.ranges import BELOW_ONE, COUNT, member, refuse
from ztk.core.policies.tier import Tier

if TYPE_CHECKING:
    from ztk.core.policies.config import Config

_MAY_AVERAGE = When(
    "task=pretrain or task=plan, and zero=stage0 to stage3",
    lambda config, machine: config.task.name in ("pretrain", "plan") and config.zero.engine == "ztk",
)
_AVERAGES = When("ema.decay above 0", lambda config, machine: bool(config.ema.decay))


def _every(config: "Config") -> Iterator[str]:
    if config.ema.every is not None and config.ema.every > config.train.steps:
        yield (
            f"ema.every={config.ema.every} would never come with train.steps={config.train.steps}: use ema.every=1, or leave out ema.decay"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EmaPolicy:
    """An average of the weights over training, stored in fp32 with the master weights (Polyak and Juditsky 1992,
    https://doi.org/10.1137/0330046, with decaying weights). It starts as a copy of the first weights, and an update makes it
    average + (1 - decay) (weights - average).

    every: includes skipped steps; an update of the average at a step that overflow skipped does nothing.
    offload: None stores the average as one more row of the optimizer states. The tier changes no bit.

    Raises:
        ValueError: a number is out of range, or there is no such tier.
    """

    changes: ClassVar = Changes.experiment

    decay: float = key(
        "part of the average that an update leaves, such as 0.999; the rest is the new weights; null or 0: no average is kept",
        default=0.999,
        range=BELOW_ONE,
        acts=_MAY_AVERAGE,
        optional=True,
    )
    every: int = key(
        "optimizer steps between updates of the average", default=1, range=COUNT, acts=_AVERAGES, contradicts=_every
    )
    offload: Tier | None = key(
        "tier of the average: none (the device), cpu (main memory), nvme (files); null: as offload.optimizer",
        acts=_AVERAGES,
        optional=True,
    )

    def __post_init__(self) -> None:
        if self.offload is not None:
            object.__setattr__(self, "offload", member(self.offload, of=Tier, key="ema.offload"))
        refuse(key_faults(self, section="ema"))

    def is_apart(self, *, optimizer: Tier) -> bool:
        """Whether the average is stored on another tier than the optimizer states."""
        return self.offload not in (None, optimizer)


@section
class EmaConfig(EmaPolicy):
    """An exponential moving average of the weights, in fp32 shards."""
