"""Keys of `precision`: dtypes, master weights, loss scale."""

from dataclasses import dataclass
from enum import StrEnum

from ztk.config.key import key


class DType(StrEnum):
    """In what the model computes."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class MasterWeights(StrEnum):
    """precision.master: what the optimizer updates."""

    fp32 = "fp32"  # float32 weights, of which the parameters are casts
    stochastic = "stochastic"  # the bfloat16 parameters; 8 more bits with optimizer.states=8bit


@dataclass(kw_only=True)
class LossScaleConfig:
    """How the loss is scaled in float16."""

    dynamic: bool | None = key("adapt the scale to overflows; false: it stays at initial", default=None)
    initial: float | None = key("first scale", default=None)
    window: int | None = key("steps without overflow before the scale doubles", default=None)
    hysteresis: int | None = key("overflows in a row that are tolerated before the scale halves", default=None)
    floor: float | None = key("an overflow at this scale ends the run", default=None)


@dataclass(kw_only=True)
class PrecisionConfig:
    """The dtypes of parameters, gradients and collectives."""

    dtype: DType = key(
        "dtype of parameters, activations and gradients; 16-bit ones have master weights, see precision.master"
    )
    reduce_dtype: DType | None = key("dtype in which gradients are reduced; null: as precision.dtype", default=None)
    master: MasterWeights | None = key(
        "master weights: fp32, or stochastic: the bf16 parameters are their own, rounded stochastically; null: stochastic with "
        "optimizer.states=8bit, else fp32",
        default=None,
    )
    loss_scale: LossScaleConfig
