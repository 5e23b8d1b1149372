"""Whether an exponential moving average of the weights is kept."""

from dataclasses import dataclass

from ztk.policies.ranges import BELOW_ONE, COUNT, range_faults, refuse

RANGES = {"decay": BELOW_ONE, "every": COUNT}


@dataclass(frozen=True, kw_only=True, slots=True)
class EmaPolicy:
    """An average of the weights over training, in fp32 beside the master weights (Polyak and Juditsky 1992,
    https://doi.org/10.1137/0330046, with weights that decay): it starts as a copy of the first weights, and an update makes it
    average + (1 - decay) (weights - average).

    decay: what is left of the average after an update. every: optimizer steps between updates, counted with the skipped ones; a
        step that overflow made skip updates nothing.

    Raises:
        ValueError: a number is out of range.
    """

    decay: float = 0.999
    every: int = 1

    def __post_init__(self) -> None:
        refuse(range_faults(self, section="ema", ranges=RANGES))
