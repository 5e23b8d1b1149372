"""Keys of `task=sft` and `task=dpo`. `RewardConfig` in `rollout` has the keys of `task=reward`."""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from ztk.core.policies.key import key, tasks
from ztk.core.policies.ranges import NOT_NEGATIVE, POSITIVE, Range


class DpoLossName(StrEnum):
    """dpo.loss: the loss over pairs."""

    sigmoid = "sigmoid"
    ipo = "ipo"
    hinge = "hinge"


class DpoReferenceName(StrEnum):
    """dpo.reference: what the policy is compared with."""

    frozen = "frozen"
    lora_off = "lora_off"
    precomputed = "precomputed"
    none = "none"


class RewardLossName(StrEnum):
    """reward.loss: the loss of a reward model."""

    bradley_terry = "bradley_terry"
    per_token = "per_token"


_SFT, _DPO = tasks("sft"), tasks("dpo")


@dataclass(kw_only=True)
class SftConfig:
    """Supervised fine-tuning."""

    acts: ClassVar = _SFT

    mask_prompts: bool | None = key("only answers count in the loss; false: every token does")


@dataclass(kw_only=True)
class DpoConfig:
    """Direct preference optimisation."""

    acts: ClassVar = _DPO

    loss: DpoLossName | None = key(
        "sigmoid: DPO; ipo: squared distance of the log-ratio margin from 1 / (2 beta); hinge: SLiC's"
    )
    beta: float | None = key(
        "factor of the log ratios to the reference: the price of moving away from it", range=POSITIVE
    )
    label_smoothing: float | None = key(
        "assumed fraction of pairs whose answers are exchanged (dpo.loss=sigmoid)",
        range=Range(low=0, high=0.499, float32=True),
    )
    length_normalised: bool | None = key("log-probabilities are means over an answer's tokens, not sums")
    sft_weight: float | None = key(
        "factor of the chosen answers' mean negative log-probability per token, added to the loss", range=NOT_NEGATIVE
    )
    reference: DpoReferenceName | None = key(
        "the model before the first step. frozen: an engine of its own, with the run's strategy; lora_off: with "
        "lora=adapter, the policy without its adapters, no second model; precomputed: its log-probabilities of all "
        "pairs are computed before the first step, then its memory is free; none: there is none, its log-probabilities count as 0"
    )
