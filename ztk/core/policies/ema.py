"""Whether an exponential moving average of the weights is kept."""

from dataclasses import dataclass

from ztk.core.policies.ranges import BELOW_ONE, COUNT, range_faults, refuse
from ztk.core.policies.tier import Tier

RANGES = {"decay": BELOW_ONE, "every": COUNT}


@dataclass(frozen=True, kw_only=True, slots=True)
class EmaPolicy:
    """An average of the weights over training, in fp32 beside the master weights (Polyak and Juditsky 1992,
    https://doi.org/10.1137/0330046, with weights that decay): it starts as a copy of the first weights, and an update makes it
    average + (1 - decay) (weights - average).

    decay: what is left of the average after an update. every: optimizer steps between updates, counted with the skipped ones; a
        step that overflow made skip updates nothing. offload: the tier on which the average is stored; None: that of the optimizer states,
        in whose memory it is then a row more. It changes no bit.

    Raises:
        ValueError: a number is out of range, or there is no such tier.
    """

    decay: float = 0.999
    every: int = 1
    offload: Tier | None = None

    def __post_init__(self) -> None:
        if self.offload is not None and self.offload not in list(Tier):
            raise ValueError(f"ema.offload={self.offload!r} is not a tier; choose one of {', '.join(Tier)}")
        object.__setattr__(self, "offload", None if self.offload is None else Tier(self.offload))
        refuse(range_faults(self, section="ema", ranges=RANGES))

    def is_apart(self, *, optimizer: Tier) -> bool:
        """Whether the average is on another tier than the optimizer states."""
        return self.offload not in (None, optimizer)
