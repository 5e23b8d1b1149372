"""The keys of `task=sft`, `task=reward` and `task=dpo` that no other task has. See `schema`; the reward model's are in `RewardConfig`."""

from dataclasses import dataclass
from enum import StrEnum

from ztk.config.key import key


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


class ChatTemplateName(StrEnum):
    """data.chat_template: how messages are written."""

    tokenizer = "tokenizer"
    roles = "roles"


class TruncationName(StrEnum):
    """data.truncate_prompts: what goes of a prompt that is too long."""

    left = "left"
    right = "right"


@dataclass(kw_only=True)
class SftConfig:
    """Supervised fine-tuning."""

    mask_prompts: bool | None = key("only answers count in the loss; false: every token does", default=None)


@dataclass(kw_only=True)
class DpoConfig:
    """Direct preference optimisation."""

    loss: DpoLossName | None = key(
        "sigmoid: DPO; ipo: squared distance of the log-ratio margin from 1 / (2 beta); hinge: SLiC's", default=None
    )
    beta: float | None = key(
        "factor of the log ratios to the reference: the price of moving away from it", default=None
    )
    label_smoothing: float | None = key(
        "assumed fraction of pairs whose answers are exchanged (dpo.loss=sigmoid)", default=None
    )
    length_normalised: bool | None = key("log-probabilities are means over an answer's tokens, not sums", default=None)
    sft_weight: float | None = key(
        "factor of the chosen answers' mean negative log-probability per token, added to the loss", default=None
    )
    reference: DpoReferenceName | None = key(
        "the model before the first step. frozen: an engine of its own, with the run's strategy; lora_off: with "
        "lora=adapter, the policy without its adapters, no second model; precomputed: its log-probabilities of all "
        "pairs are computed before the first step, then its memory is free; none: there is none, its log-probabilities count as 0",
        default=None,
    )
