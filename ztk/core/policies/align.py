"""Keys of `task=sft`, `task=dpo` and `task=distill`. `RewardConfig` in `reward` has the keys of `task=reward`."""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from ztk.core.policies.key import When, key, key_faults, section, tasks
from ztk.core.policies.paths import Paths
from ztk.core.policies.ranges import FRACTION, NOT_NEGATIVE, POSITIVE, Range, refuse


class DpoLossName(StrEnum):
    """dpo.loss: the loss over pairs."""

    sigmoid = "sigmoid"
    ipo = "ipo"
    hinge = "hinge"
    simpo = "simpo"
    orpo = "orpo"
    kto = "kto"


WITHOUT_REFERENCE = (DpoLossName.simpo, DpoLossName.orpo)


class DpoReferenceName(StrEnum):
    """dpo.reference: the model that the policy is compared with."""

    frozen = "frozen"
    lora_off = "lora_off"
    precomputed = "precomputed"
    none = "none"


def _losses(*names: str) -> When:
    """Runs of task=dpo with one of these losses."""
    *others, last = names
    words = f"task=dpo with dpo.loss={', '.join(others)} or {last}" if others else f"task=dpo with dpo.loss={last}"
    return When(words, lambda config, machine: config.task.name == "dpo" and config.dpo.loss in names)


class RewardLossName(StrEnum):
    """reward.loss: the loss of a reward model."""

    bradley_terry = "bradley_terry"
    per_token = "per_token"


_SFT, _DPO = tasks("sft"), tasks("dpo")
_SIGMOID = _losses("sigmoid", "simpo")
_LOG_RATIOS = _losses("sigmoid", "ipo", "hinge")
_PAIRS = _losses("sigmoid", "ipo", "hinge", "simpo", "orpo")
_SIMPO, _KTO = _losses("simpo"), _losses("kto")


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
        "sigmoid: DPO; ipo: squared distance of the log-ratio margin from 1 / (2 beta); hinge: SLiC's; simpo: of mean log-probabilities, "
        "without a reference; orpo: of odds, without a reference; kto: of single answers with labels, or of the answers of pairs"
    )
    beta: float | None = key(
        "factor of the log ratios to the reference: the price of moving away from it", range=POSITIVE
    )
    label_smoothing: float | None = key(
        "assumed fraction of pairs whose answers are exchanged",
        acts=_SIGMOID,
        range=Range(low=0, high=0.499, float32=True),
    )
    length_normalised: bool | None = key(
        "log-probabilities are means over an answer's tokens, not sums", acts=_LOG_RATIOS
    )
    sft_weight: float | None = key(
        "factor of the chosen answers' mean negative log-probability per token, added to the loss; with dpo.loss=orpo prompts count, too",
        range=NOT_NEGATIVE,
        acts=_PAIRS,
    )
    margin: float | None = key(
        "by which beta times the difference of mean log-probabilities is to be above 0",
        default=0.5,
        range=NOT_NEGATIVE,
        acts=_SIMPO,
    )
    desirable_weight: float | None = key(
        "factor of the losses of desirable answers", default=1.0, range=NOT_NEGATIVE, acts=_KTO
    )
    undesirable_weight: float | None = key(
        "factor of the losses of undesirable answers", default=1.0, range=NOT_NEGATIVE, acts=_KTO
    )
    reference: DpoReferenceName | None = key(
        "the model before the first step. frozen: an engine of its own, with the run's strategy; lora_off: with "
        "lora=adapter, the policy without its adapters, no second model; precomputed: its log-probabilities of all "
        "pairs are computed before the first step, then its memory is free; none: there is none, its log-probabilities count as 0"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillPolicy:
    """The loss between student and teacher.

    Raises:
        ValueError: a number out of its range.
    """

    acts: ClassVar = tasks("distill")

    beta: float = key(
        "0: the forward divergence KL(teacher, student); 1: the reverse one; between them the generalised Jensen-Shannon divergence",
        default=0.5,
        range=FRACTION,
    )
    temperature: float = key(
        "divides the logits of student and teacher in the loss; draws have rollout.temperature",
        default=1.0,
        range=POSITIVE,
    )

    def __post_init__(self) -> None:
        refuse(key_faults(self, section="distill"))


@section
class DistillConfig(DistillPolicy):
    """Knowledge distillation: a student learns the next-token distributions of a teacher."""

    teacher: str | None = key(
        "run folder, checkpoint, or folder of a model of transformers with the student's vocabulary",
        optional=True,
        paths=Paths(kind="run", fix="name a run folder with checkpoints, or a model of transformers"),
    )
    fraction: float | None = key(
        "part of the steps that take the student's own draws in place of the data's answers", range=FRACTION
    )
    seq_kd: bool | None = key("the other steps take draws of the teacher in place of the data's answers")
