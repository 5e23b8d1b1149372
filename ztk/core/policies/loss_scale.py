"""How the loss is scaled."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from ztk.core.policies.key import key_faults
from ztk.core.policies.precision import LossScaleConfig
from ztk.core.policies.ranges import POSITIVE, Range, refuse

_OTHERS = {  # of fields that no key sets
    "growth_factor": Range(low=1, above=True, float32=True),
    "backoff_factor": Range(low=0, high=1, above=True, below=True, float32=True),
    "maximum": POSITIVE,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScalePolicy:
    """How the loss is scaled so that 16-bit gradients neither vanish nor overflow.

    Dynamic scaling works as in apex and DeepSpeed: an overflow skips the step and uses up one unit of `hysteresis`;
    when none is left, every overflow multiplies the scale by `backoff_factor`, down to `floor`. After `window` steps
    without overflow in a row, not counting the run's first and the first after an overflow, the scale is multiplied by
    `growth_factor`, up to `maximum`, and the hysteresis is restored; with `consecutive_hysteresis` every step without overflow
    restores it.
    Static scaling keeps `initial` for ever. Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, section 3.2.

    Raises ValueError for a value that cannot work, naming the key and a value that can.
    """

    dynamic: bool = True
    initial: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    floor: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    maximum: float = 2.0**24

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        yield from key_faults(self, keys=LossScaleConfig, section="precision.loss_scale", others=_OTHERS)
        if self.dynamic and not self.floor <= self.initial <= self.maximum:
            yield (
                f"precision.loss_scale.initial={self.initial}: must lie between precision.loss_scale.floor={self.floor}"
                f" and precision.loss_scale.maximum={self.maximum}"
            )

    @classmethod
    def off(cls) -> Self:
        """No scaling: the factor is 1 and stays."""
        return cls(dynamic=False, initial=1.0)
