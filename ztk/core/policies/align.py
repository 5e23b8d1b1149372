"""Keys of `task=sft`, `task=dpo` and `task=distill`. `RewardConfig` in `reward` has the keys of `task=reward`."""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from ztk.core.policies.key import When, key, key_faults, section, tasks
from ztk.core.policies.paths import Paths
from ztk.core.policies.ranges import FRACTION, NOT_NEGATIVE, POSITIVE, Range, member, refuse


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
    return When(
        words,
        lambda config, machine: config.task.name == "dpo" and config.dpo.loss in names,
        section="dpo",
        section_test=lambda values: values.loss in names,
    )


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


@dataclass(frozen=True, kw_only=True, slots=True)
class DpoPolicy:
    """A loss over preferences.

    loss: sigmoid (Rafailov et al. 2023, arXiv 2305.18290), ipo (Azar et al. 2023, arXiv 2310.12036), hinge (Zhao et al. 2023, arXiv
    2305.10425), simpo (Meng et al. 2024, arXiv 2405.14734), orpo (Hong et al. 2024, arXiv 2403.07691) or kto (Ethayarajh et al. 2024, arXiv
    2402.01306). simpo and orpo have no reference and average over an answer's tokens. label_smoothing is cDPO's (Mitchell 2023), sft_weight
    is in arXiv 2404.19733.

    Raises:
        ValueError: a number out of its range, an unknown loss, or a value that the loss does not read.
    """

    acts: ClassVar = _DPO

    loss: DpoLossName = key(
        "sigmoid: DPO; ipo: squared distance of the log-ratio margin from 1 / (2 beta); hinge: SLiC's; simpo: of mean log-probabilities, "
        "without a reference; orpo: of odds, without a reference; kto: of single answers with labels, or of the answers of pairs",
        default=DpoLossName.sigmoid,
    )
    beta: float = key(
        "factor of the log ratios to the reference: the price of moving away from it", default=0.1, range=POSITIVE
    )
    label_smoothing: float = key(
        "assumed fraction of pairs whose answers are exchanged",
        default=0.0,
        acts=_SIGMOID,
        range=Range(low=0, high=0.499, float32=True),
    )
    length_normalised: bool = key(
        "log-probabilities are means over an answer's tokens, not sums", default=False, acts=_LOG_RATIOS
    )
    sft_weight: float = key(
        "factor of the chosen answers' mean negative log-probability per token, added to the loss; with dpo.loss=orpo prompts count, too",
        default=0.0,
        range=NOT_NEGATIVE,
        acts=_PAIRS,
    )
    margin: float = key(
        "by which beta times the difference of mean log-probabilities is to be above 0",
        default=0.5,  # TRL's simpo_gamma
        range=NOT_NEGATIVE,
        acts=_SIMPO,
    )
    desirable_weight: float = key(
        "factor of the losses of desirable answers", default=1.0, range=NOT_NEGATIVE, acts=_KTO
    )
    undesirable_weight: float = key(
        "factor of the losses of undesirable answers", default=1.0, range=NOT_NEGATIVE, acts=_KTO
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", member(self.loss, of=DpoLossName, key="dpo.loss"))
        refuse(key_faults(self, section="dpo"))

    @property
    def is_mean(self) -> bool:
        """Whether log-probabilities are averaged over an answer's tokens."""
        return self.length_normalised or self.loss in WITHOUT_REFERENCE


@section
class DpoConfig(DpoPolicy):
    """Direct preference optimisation."""

    reference: DpoReferenceName | None = key(
        "the model before the first step. frozen: an engine of its own, with the run's strategy; lora_off: with "
        "lora=adapter, the policy without its adapters, no second model; precomputed: its log-probabilities of all "
        "pairs are computed before the first step, then its memory is free; none: there is none, its log-probabilities count as 0",
        default=DpoReferenceName.frozen,
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
