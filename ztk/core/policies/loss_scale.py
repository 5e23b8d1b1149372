"""How the loss is scaled."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from ztk.core.policies.key import When, key, key_faults, section
from ztk.core.policies.ranges import COUNT, POSITIVE, Range, refuse

if TYPE_CHECKING:
    from ztk.core.policies.config import Config

_SCALED = When("precision=fp16", lambda config, machine: config.precision.dtype == "fp16")
_ADAPTED = When(
    "precision=fp16 with precision.loss_scale.dynamic=true",
    lambda config, machine: config.precision.dtype == "fp16" and config.precision.loss_scale.dynamic is not False,
)


def _initial_faults(config: "Config") -> Iterator[str]:
    scale = config.precision.loss_scale
    if scale.dynamic and scale.initial and scale.floor and scale.initial < scale.floor:
        yield (
            f"precision.loss_scale.initial={scale.initial:g} lies below "
            f"precision.loss_scale.floor={scale.floor:g}: use precision.loss_scale.floor={scale.initial:g}"
        )


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

    dynamic: bool = key("adapt the scale to overflows; false: it stays at initial", default=True, acts=_SCALED)
    initial: float = key("first scale", default=2.0**16, range=POSITIVE, acts=_SCALED, contradicts=_initial_faults)
    window: int = key("steps without overflow before the scale doubles", default=1000, range=COUNT, acts=_ADAPTED)
    hysteresis: int = key(
        "overflows in a row that are tolerated before the scale halves", default=2, range=COUNT, acts=_ADAPTED
    )
    floor: float = key("an overflow at this scale ends the run", default=1.0, range=POSITIVE, acts=_ADAPTED)
    consecutive_hysteresis: bool = False
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    maximum: float = 2.0**24

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        yield from key_faults(self, section="precision.loss_scale", others=_OTHERS)
        if self.dynamic and not self.floor <= self.initial <= self.maximum:
            yield (
                f"precision.loss_scale.initial={self.initial}: must lie between precision.loss_scale.floor={self.floor}"
                f" and precision.loss_scale.maximum={self.maximum}"
            )

    @classmethod
    def off(cls) -> Self:
        """No scaling: the factor is 1 and stays."""
        return cls(dynamic=False, initial=1.0)


@section
class LossScaleConfig(LossScalePolicy):
    """How the loss is scaled in float16."""
