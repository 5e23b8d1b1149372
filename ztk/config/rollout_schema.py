"""The keys of `task=grpo` and `task=ppo`: rollouts, advantages, the policy's loss, the KL divergence, rewards. See `schema`."""

from dataclasses import dataclass
from enum import StrEnum

from ztk.config.align_schema import RewardLossName
from ztk.config.key import key
from ztk.config.precision_schema import DType
from ztk.core.policies.tier import Tier


class RolloutEngineName(StrEnum):
    """rollout.engine: what computes answers."""

    trainer = "trainer"
    generator = "generator"


class RolloutWeightsName(StrEnum):
    """rollout.weights: when parameters are gathered at stage 3."""

    auto = "auto"
    whole = "whole"
    streamed = "streamed"


class RolloutIdentity(StrEnum):
    """rollout.identity: how log-probabilities of rollouts are compared."""

    exact = "exact"
    corrected = "corrected"
    off = "off"


class BaselineName(StrEnum):
    """advantage.baseline: what a reward is compared with."""

    critic = "critic"
    mean = "mean"
    leave_one_out = "leave_one_out"


class AdvantageScale(StrEnum):
    """advantage.scale: what an advantage is divided by."""

    group = "group"
    batch = "batch"
    none = "none"


class RatioName(StrEnum):
    """policy.ratio: of what the ratio of probabilities is."""

    token = "token"
    sequence = "sequence"


class PolicyForm(StrEnum):
    """policy.form: how the policy's loss is clipped."""

    clipped = "clipped"
    cispo = "cispo"


class AverageName(StrEnum):
    """policy.average: what the policy's loss is a mean of."""

    sequence = "sequence"
    tokens = "tokens"
    constant = "constant"


class KlEstimator(StrEnum):
    """kl.estimator: the estimate of the divergence."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    k3_weighted = "k3_weighted"


class KlPlace(StrEnum):
    """kl.place: where the divergence enters."""

    reward = "reward"
    loss = "loss"


class ReferenceName(StrEnum):
    """kl.reference: what the divergence is measured to."""

    frozen = "frozen"
    lora_off = "lora_off"
    none = "none"


class PromptTask(StrEnum):
    """rollout.task: prompts that are made on the spot."""

    sorting = "sorting"
    arithmetic = "arithmetic"
    copying = "copying"
    lexicon = "lexicon"


# Most bytes of a prompt and of an answer, its end included.
TASK_LENGTHS = {
    PromptTask.sorting: (6, 6),
    PromptTask.arithmetic: (6, 3),
    PromptTask.copying: (6, 6),
    PromptTask.lexicon: (7, 7),
}


@dataclass(kw_only=True)
class RolloutConfig:
    """What is drawn from the policy, and how it is checked."""

    task: PromptTask | None = key(
        "prompts, answers and exact rewards that are made on the spot. sorting, copying: of letters; arithmetic: sums; lexicon: words to be "
        "translated. null: data.path has them",
        default=None,
    )
    prompts: int | None = key("prompts of a rollout, over all ranks", default=None)
    group_size: int | None = key("answers per prompt", default=None)
    max_tokens: int | None = key("tokens of an answer, at most", default=None)
    temperature: float | None = key("divides the logits, for drawing and for the log-probabilities", default=None)
    engine: RolloutEngineName | None = key(
        "what computes answers. trainer: the forward of the engine that trains, over its shards; generator: the inference engine, on the CPU, "
        "over a copy of the weights in fp32 on every rank, with a cache of keys and values for models of transformers, too",
        default=None,
    )
    weights: RolloutWeightsName | None = key(
        "at stage 3: whole: parameters are gathered once per rollout, as many as zero.max_live_parameters allows; streamed: for every "
        "forward, in the memory of training; auto: whole if they fit into what is free on every rank, and the run says so",
        default=None,
    )
    tensor: int | None = key(
        "neighbouring ranks that share a copy of rollout.engine=generator, each with a part of every layer",
        default=None,
    )
    identity: RolloutIdentity | None = key(
        "exact: the trainer's log-probabilities of a rollout must equal the stored ones bit for bit, or the run stops; corrected: their "
        "ratio weighs the loss (truncated importance sampling); off: neither",
        default=None,
    )
    correction_max: float | None = key("largest weight of rollout.identity=corrected", default=None)
    drop_equal_groups: bool | None = key("answers of a group with equal rewards do not count in the loss", default=None)
    mask_truncated: bool | None = key(
        "answers that were cut at rollout.max_tokens do not count in the loss", default=None
    )
    show_every: int | None = key("steps between texts on screen and in samples.jsonl; 0: none", default=None)
    stop_entropy_below: float | None = key(
        "the run stops when the mean entropy, nats per token, is below; null: never", default=None
    )


@dataclass(kw_only=True)
class WarmStartConfig:
    """Supervised steps before the first rollout, on answers of which some are wrong."""

    steps: int | None = key("supervised steps; 0: none", default=None)
    correct: float | None = key("fraction of the answers that are right", default=None)
    lr: float | None = key("learning rate of these steps", default=None)
    batch_size: int | None = key("examples per step, over all ranks", default=None)
    path: str | None = key(
        "run folder or checkpoint of a decoder of this shape, whose parameters are the first ones; null: those of train.seed",
        default=None,
    )


@dataclass(kw_only=True)
class AdvantageConfig:
    """How much better an answer is than expected."""

    baseline: BaselineName | None = key(
        "what is expected: critic: a second model's value per token (GAE); mean: the group's mean; leave_one_out: the mean of the others",
        default=None,
    )
    scale: AdvantageScale | None = key(
        "divide by the standard deviation of the group's rewards (group) or whiten over all answer tokens (batch)",
        default=None,
    )
    gamma: float | None = key("discount per token", default=None)
    lam: float | None = key("lambda of generalised advantage estimation", default=None)


@dataclass(kw_only=True)
class PolicyConfig:
    """The loss of the policy."""

    ratio: RatioName | None = key(
        "ratio of probabilities per token, or its geometric mean per answer (GSPO)", default=None
    )
    form: PolicyForm | None = key("clipped: PPO's minimum; cispo: the clipped ratio as a constant weight", default=None)
    clip_low: float | None = key("the ratio is clipped at 1 - clip_low", default=None)
    clip_high: float | None = key("the ratio is clipped at 1 + clip_high", default=None)
    dual_clip: float | None = key("bound on the ratio of negative advantages; null: none", default=None)
    average: AverageName | None = key(
        "sequence: mean over answers of means over tokens; tokens: mean over all tokens of the batch; constant: sum over "
        "(answers * rollout.max_tokens)",
        default=None,
    )


@dataclass(kw_only=True)
class KlConfig:
    """The KL divergence to the reference, the model as it was before the first rollout."""

    reference: ReferenceName | None = key(
        "frozen: a copy of the first weights is kept, with lora=adapter of those below the adapters; lora_off: with lora=adapter, the policy "
        "without its adapters, no second model; none: nothing is measured",
        default=None,
    )
    coef: float | None = key("factor of the divergence; 0: it is measured alone", default=None)
    estimator: KlEstimator | None = key(
        "k1: log ratio; k2: half its square; k3: exp(-k1) - 1 + k1; k3_weighted: k3 times the ratio to the old policy, whose gradient is "
        "the divergence's",
        default=None,
    )
    place: KlPlace | None = key("subtract it from each token's reward, or add it to the loss", default=None)
    stop_above: float | None = key("the run saves and stops above so many nats per answer; null: never", default=None)


class StageName(StrEnum):
    """What a model beside the policy shards."""

    stage0 = "stage0"
    stage1 = "stage1"
    stage2 = "stage2"
    stage3 = "stage3"


@dataclass(kw_only=True)
class StrategyConfig:
    """Where a model beside the policy differs from the policy's zero, offload and precision."""

    zero: StageName | None = key("what it shards; null: as zero.stage", default=None)
    offload: Tier | None = key(
        "where its shards are stored, at stage 3 its parameters, too; null: as offload", default=None
    )
    precision: DType | None = key("dtype of its parameters; null: as precision.dtype", default=None)


@dataclass(kw_only=True)
class ReferenceConfig(StrategyConfig):
    """The engine of kl.reference=frozen or dpo.reference=frozen, which never steps."""


@dataclass(kw_only=True)
class CriticConfig(StrategyConfig):
    """The second model of advantage.baseline=critic: an engine of its own with the policy's shape and first weights."""

    lr: float | None = key("learning rate of the critic", default=None)
    value_clip: float | None = key("a value may move by this much from the old one; 0: no clipping", default=None)


@dataclass(kw_only=True)
class RewardConfig(StrategyConfig):
    """The reward of an answer, and the model that learns it, or gives it (reward.path): an engine of its own, as the critic."""

    function: str | None = key(
        "FILE.py:FUNCTION, called as FUNCTION(prompt=, answer=, record=); a number, or None to leave the answer out; null: the task's own",
        default=None,
    )
    path: str | None = key(
        "run folder or checkpoint of task=reward, of the policy's shape, whose value at the last token is the reward; the function's is shown "
        "beside it as true_reward; null: the function's reward trains",
        default=None,
    )
    timeout_seconds: float | None = key("longest time of one call", default=None)
    loss: RewardLossName | None = key(
        "of a reward model. bradley_terry: of the values at the last tokens; per_token: DeepSpeed-Chat's, of all values behind the common "
        "beginning",
        default=None,
    )
    margin: float | None = key(
        "by which a chosen answer's value is to be larger, where a record has no margin", default=None
    )
    centring: float | None = key("factor of (chosen + rejected)^2, added to the loss", default=None)
