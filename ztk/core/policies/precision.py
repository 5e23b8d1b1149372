"""Keys of `precision`: dtypes, master weights, loss scale."""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from ztk.core.policies.key import When, key
from ztk.core.policies.loss_scale import LossScaleConfig

if TYPE_CHECKING:
    from ztk.core.policies.config import Config


class DType(StrEnum):
    """The dtype in which the model computes."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class MasterWeights(StrEnum):
    """precision.master: the weights that the optimizer updates."""

    fp32 = "fp32"  # float32 weights, of which the parameters are casts
    stochastic = "stochastic"  # the bfloat16 parameters; 8 more bits with optimizer.states=8bit


class Float8Recipe(StrEnum):
    """precision.float8: the products of linear layers in float8. The first two names are torchao's."""

    rowwise = "rowwise"  # all three products of a layer
    rowwise_with_gw_hp = "rowwise_with_gw_hp"  # the weight's gradient in 16 bits
    rowwise_e5m2 = "rowwise_e5m2"  # all three products, gradients in e5m2


_BF16 = When("precision=bf16 or precision=fp8", lambda config, machine: config.precision.dtype == "bf16")


def _float8_faults(config: "Config") -> Iterator[str]:
    recipe = config.precision.float8
    if recipe is None:
        return
    if config.zero.engine != "ztk":
        yield f"precision.float8={recipe}: zero={config.zero.engine} has no float8 products; use zero=stage0 to stage3, or precision=bf16"
    if config.zero.quantized_weights:
        yield (
            f"precision.float8={recipe} gathers weights in float8, and zero.quantized_weights=true as int8: leave zero.quantized_weights out, "
            "or use precision=bf16"
        )


@dataclass(kw_only=True)
class PrecisionConfig:
    """The dtypes of parameters, gradients and collectives."""

    dtype: DType = key(
        "dtype of parameters, activations and gradients; 16-bit ones have master weights, see precision.master",
        default=MISSING,
    )
    reduce_dtype: DType | None = key("dtype in which gradients are reduced; null: as precision.dtype")
    master: MasterWeights | None = key(
        "master weights: fp32, or stochastic: the bf16 parameters are their own, rounded stochastically; null: stochastic with "
        "optimizer.states=8bit, else fp32"
    )
    float8: Float8Recipe | None = key(
        "how linear layers inside blocks multiply in float8 (e4m3 with a scale per row): rowwise (forward and backward), "
        "rowwise_with_gw_hp (weight gradients in bf16), or rowwise_e5m2 (gradients as e5m2); stage 3 gathers their weights in float8; null: "
        "they do not",
        acts=_BF16,
        optional=True,
        contradicts=_float8_faults,
    )
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
