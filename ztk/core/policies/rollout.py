"""Keys of rollouts, advantages, losses of policies, KL divergences, rewards and second models."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from ztk.core.policies.key import Changes, When, key, tasks
from ztk.core.policies.paths import ObjectNames, Paths
from ztk.core.policies.precision import DType
from ztk.core.policies.prompt_tasks import PromptTask
from ztk.core.policies.ranges import COUNT, COUNT_OR_ZERO, FRACTION, NOT_NEGATIVE, POSITIVE, Range
from ztk.core.policies.routing import HELP, ROUTES, RolloutExperts
from ztk.core.policies.runs import distills_draws, draws, is_hugging_face
from ztk.core.policies.tier import Tier

if TYPE_CHECKING:
    from ztk.core.policies.config import Config


class RolloutEngineName(StrEnum):
    """rollout.engine: the engine that computes answers."""

    trainer = "trainer"
    generator = "generator"


PLACED = "ray"  # in place of the address of a server that Ray starts


class RolloutWeights(StrEnum):
    """rollout.weights: when parameters are gathered at stage 3. At lower stages they are always full."""

    auto = "auto"  # whole if all parameters fit, else streamed
    whole = "whole"  # gathered once and kept, up to zero.max_live_parameters; a rollout moves each parameter once
    streamed = "streamed"  # gathered for every forward and released afterwards: needs as much memory as training


class RolloutIdentity(StrEnum):
    """rollout.identity: how log-probabilities of rollouts are compared."""

    exact = "exact"
    corrected = "corrected"
    off = "off"


class ServerApi(StrEnum):
    """rollout.servers_api: the kind of rollout.servers."""

    ztk = "ztk"
    vllm = "vllm"


class CorrectionName(StrEnum):
    """rollout.correction: the weights of rollout.identity=corrected. TRL's names."""

    token_truncate = "token_truncate"
    token_mask = "token_mask"
    sequence_truncate = "sequence_truncate"
    sequence_mask = "sequence_mask"


class BaselineName(StrEnum):
    """advantage.baseline: the expected reward that is subtracted."""

    critic = "critic"
    mean = "mean"
    leave_one_out = "leave_one_out"


class AdvantageScale(StrEnum):
    """advantage.scale: the divisor of an advantage."""

    group = "group"
    batch = "batch"
    none = "none"


class RatioName(StrEnum):
    """policy.ratio: the level of the ratio of probabilities."""

    token = "token"
    sequence = "sequence"


class PolicyForm(StrEnum):
    """policy.form: how the policy's loss is clipped."""

    clipped = "clipped"
    cispo = "cispo"


class AverageName(StrEnum):
    """policy.average: the mean that the policy's loss is."""

    sequence = "sequence"
    tokens = "tokens"
    constant = "constant"


class TransferName(StrEnum):
    """rollout.servers_transfer: the way of new weights."""

    http = "http"
    folder = "folder"
    gloo = "gloo"


class LateName(StrEnum):
    """rollout.late: the fate of answers that the next update waits for."""

    carry = "carry"
    cut = "cut"


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
    """kl.reference: the model that the divergence is measured to."""

    frozen = "frozen"
    lora_off = "lora_off"
    none = "none"


class StageName(StrEnum):
    """The states that a second model shards."""

    stage0 = "stage0"
    stage1 = "stage1"
    stage2 = "stage2"
    stage3 = "stage3"


DRAWS = tasks("grpo", "ppo")
_PPO = tasks("ppo")
_WARMS = When("task=grpo, task=ppo or task=dpo", lambda config, machine: config.task.name in ("grpo", "ppo", "dpo"))
_WARMING = When(
    "task=grpo, task=ppo or task=dpo with warm_start.steps above 0",
    lambda config, machine: _WARMS.test(config, machine) and bool(config.warm_start.steps),
)
_ALIGNS = tasks("sft", "reward", "dpo", "distill", "grpo", "ppo")
_MADE = When(
    "task=sft, reward, dpo, distill, grpo or ppo without data.path",
    lambda config, machine: _ALIGNS.test(config, machine) and config.data.path is None,
)
_ANSWERED = When(
    f"{DRAWS.words}, and task=distill with distill.fraction above 0 or distill.seq_kd",
    lambda config, machine: draws(config) or distills_draws(config),
)
_GATHERS = When(
    f"{DRAWS.words} and zero=stage3, and rollout.engine=trainer; task=distill alike",
    lambda config, machine: (
        _ANSWERED.test(config, machine)
        and config.zero.engine == "ztk"
        and config.zero.stage == 3
        and config.rollout.engine is RolloutEngineName.trainer
    ),
)
_GENERATES = When(
    f"{_ANSWERED.words}, and rollout.engine=generator",
    lambda config, machine: _ANSWERED.test(config, machine) and config.rollout.engine is RolloutEngineName.generator,
)
_ASKS = When(
    f"{_ANSWERED.words}, and rollout.servers",
    lambda config, machine: _ANSWERED.test(config, machine) and bool(config.rollout.servers),
)
_ASKS_AHEAD = When(
    f"{DRAWS.words} and rollout.staleness above 0, and rollout.servers",
    lambda config, machine: draws(config) and bool(config.rollout.staleness) and bool(config.rollout.servers),
)
_CORRECTS = When(
    "rollout.identity=corrected",
    lambda config, machine: draws(config) and config.rollout.identity is RolloutIdentity.corrected,
)
_CLIPS = When(
    f"{DRAWS.words} and policy.form=clipped",
    lambda config, machine: draws(config) and config.policy.form is PolicyForm.clipped,
)
_DIVERGES = When(f"{DRAWS.words} and kl.coef above 0", lambda config, machine: draws(config) and bool(config.kl.coef))
_REFERENCE = When(
    "kl.reference=frozen, dpo.reference=frozen or task=distill",
    lambda config, machine: (
        config.task.name == "distill"
        or (draws(config) and config.kl.reference == "frozen")
        or (config.task.name == "dpo" and config.dpo.reference == "frozen")
    ),
)
_SAVES_COMPLETIONS = When(
    f"{DRAWS.words} and rollout.save_completions=true",
    lambda config, machine: draws(config) and bool(config.rollout.save_completions),
)
EVALUATED = When(
    f"{DRAWS.words} and rollout.eval_every above 0, or checkpoint.keep_best",
    lambda config, machine: draws(config) and bool(config.rollout.eval_every or config.checkpoint.keep_best),
)
_PLAYS = When(
    f"{DRAWS.words} and rollout.environment",
    lambda config, machine: draws(config) and config.rollout.environment is not None,
)


def _baseline_faults(config: "Config") -> Iterator[str]:
    advantage, name = config.advantage, config.task.name
    critic = advantage.baseline is BaselineName.critic
    if name == "grpo" and critic:
        yield "advantage.baseline=critic: task=grpo has no critic; use task=ppo, or advantage.baseline=mean"
    if name == "ppo" and advantage.baseline is not None and not critic:
        yield f"advantage.baseline={advantage.baseline.value}: task=ppo trains a critic; use task=grpo, or advantage.baseline=critic"
    if critic and advantage.scale is AdvantageScale.group:
        yield "advantage.scale=group: values of a critic have no groups; use advantage.scale=batch"


def _group_faults(config: "Config") -> Iterator[str]:
    if config.rollout.drop_equal_groups and config.rollout.group_size == 1:
        yield (
            "rollout.drop_equal_groups=true: with rollout.group_size=1 every answer would be left out; use rollout.drop_equal_groups=false, or "
            "rollout.group_size=8"
        )


def address_faults(urls: Sequence[str] | None, *, key: str, others: Sequence[str] = ()) -> Iterator[str]:
    """A line for each of the servers of `key` that is neither an address nor one of `others`."""
    for url in urls or ():
        if str(url) not in others and not re.fullmatch(r"https?://[^/?#@\s]+/?", str(url)):
            yield f"{key}=[{url}]: must be addresses such as http://a:8000"


def _server_faults(config: "Config") -> Iterator[str]:
    rollout = config.rollout
    yield from address_faults(rollout.servers, key="rollout.servers", others=(PLACED,))
    if not rollout.servers:
        return
    if PLACED in rollout.servers:
        yield from _ray_faults(config)
    if (rollout.tensor or 1) > 1:
        yield f"rollout.tensor={rollout.tensor} with rollout.servers: the servers divide their model, by topology.tensor; use rollout.tensor=1"
    if rollout.servers_api is ServerApi.vllm:
        yield from _vllm_faults(config)
    if config.model.experts is not None and rollout.experts is not RolloutExperts.own:
        yield "rollout.experts=replay with rollout.servers: chosen experts are not sent; use rollout.experts=own"


def _ray_faults(config: "Config") -> Iterator[str]:
    if find_spec("ray") is None:
        yield f"rollout.servers=[{PLACED}]: the package ray is not installed; use pip install 'ztk[ray]'"
    if config.rollout.servers_api is ServerApi.vllm:
        yield f"rollout.servers=[{PLACED}] with rollout.servers_api=vllm: Ray starts task=serve; name the addresses of servers of vLLM"
    if config.rollout.servers_transfer is TransferName.folder:
        yield f"rollout.servers_transfer=folder with rollout.servers=[{PLACED}]: its servers have folders of their own; use http or gloo"


def _vllm_faults(config: "Config") -> Iterator[str]:
    rollout, key = config.rollout, "rollout.servers_api=vllm"
    for name, plain in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        if (value := getattr(rollout, name)) is not None and value != plain:
            yield f"rollout.{name}={value:g} with {key}: vLLM does not send the tokens that a cut keeps; use rollout.{name}={plain:g}"
    if draws(config) and rollout.identity is not RolloutIdentity.corrected:
        yield f"rollout.identity={rollout.identity} with {key}: vLLM has log-probabilities of its own; use rollout.identity=corrected"
    if rollout.late is LateName.cut:
        yield f"rollout.late=cut with {key}: tokens of vLLM's streams are not read; use rollout.late=carry"
    if (transfer := rollout.servers_transfer) in (TransferName.gloo, TransferName.folder):
        yield f"rollout.servers_transfer={transfer.value} with {key}: vLLM reads weights from the run folder; leave it out"
    if not is_hugging_face(config.model):
        yield f"{key}: vLLM reads weights by the names of transformers; use model=hf with model.path=FOLDER, or rollout.servers_api=ztk"


def _file_faults(config: "Config") -> Iterator[str]:
    name = config.rollout.completions_file or ""
    if not name.endswith(".parquet") or "/" in name:
        yield f"rollout.completions_file={name}: must be a name that ends in .parquet; use rollout.completions_file=completions.parquet"
    elif find_spec("pyarrow") is None:
        yield f'rollout.completions_file={name}: needs pyarrow: pip install "ztk[data]", or leave it out'


def _kl_faults(config: "Config") -> Iterator[str]:
    kl = config.kl
    if kl.coef and kl.place is KlPlace.loss and kl.estimator is KlEstimator.k1:
        yield "kl.estimator=k1 has no gradient in the loss (its expectation is zero): use kl.estimator=k3_weighted, or kl.place=reward"
    if kl.coef and kl.place is KlPlace.reward and kl.estimator is KlEstimator.k3_weighted:
        yield "kl.estimator=k3_weighted is a loss: use kl.estimator=k1, or kl.place=loss"
    if kl.reference is ReferenceName.none and kl.coef:
        yield f"kl.coef={kl.coef:g} needs a reference: use kl.reference=frozen, or kl.coef=0"
    if kl.reference is ReferenceName.none and kl.stop_above is not None:
        yield f"kl.stop_above={kl.stop_above:g} needs a reference: use kl.reference=frozen, or leave it out"


@dataclass(kw_only=True)
class RolloutConfig:
    """How answers are sampled from the policy and checked."""

    acts: ClassVar = DRAWS

    task: PromptTask | None = key(
        "prompts, answers and exact rewards that are made on the spot. sorting, copying: of letters; arithmetic: sums; lexicon: words to be "
        "translated. null: data.path has them",
        default=PromptTask.sorting,
        acts=_MADE,
        optional=True,
    )
    prompts: int | None = key("prompts of a rollout, over all ranks", default=16, range=COUNT)
    group_size: int | None = key("answers per prompt", default=8, range=COUNT)
    max_tokens: int | None = key(
        "tokens of an answer, at most; with rollout.environment, of all turns and observations together",
        default=8,
        range=COUNT,
        acts=_ANSWERED,
    )
    temperature: float | None = key(
        "divides the logits, for drawing and for the log-probabilities", default=1.0, range=POSITIVE, acts=_ANSWERED
    )
    top_k: int | None = key(
        "draws only so many of the likeliest tokens; 0: all", default=0, range=COUNT_OR_ZERO, acts=_ANSWERED
    )
    top_p: float | None = key(
        "draws only the likeliest tokens that together have this probability",
        default=1.0,
        range=Range(low=0, high=1, above=True),
        acts=_ANSWERED,
    )
    min_p: float | None = key(
        "draws only tokens with at least this part of the likeliest one's probability",
        default=0.0,
        range=Range(low=0, high=1),
        acts=_ANSWERED,
    )
    stop: list[str] | None = key(
        "texts of one token that end an answer, as in [<|end|>], next to the end of the format; they are left out of its text",
        optional=True,
        acts=_ANSWERED,
    )
    engine: RolloutEngineName | None = key(
        "generator: the inference engine, with a cache of keys and values: on a GPU over the trainer's own weights, on a CPU over a copy in "
        "fp32 on every rank; trainer: the training engine's forward, over its shards, for models that ranks share and models that the "
        "inference engine does not compute; a token takes a full forward",
        default=RolloutEngineName.generator,
        acts=_ANSWERED,
    )
    weights: RolloutWeights | None = key(
        "at stage 3: whole: parameters are gathered once per rollout, as many as zero.max_live_parameters allows; streamed: for every "
        "forward, in the memory of training; auto: whole if they fit into the free memory of every rank, with a note in the output",
        default=RolloutWeights.auto,
        acts=_GATHERS,
    )
    tensor: int | None = key(
        "neighbouring ranks that share a copy of rollout.engine=generator, each with a part of every layer",
        default=1,
        range=COUNT,
        acts=_GENERATES,
    )
    servers: list[str] | None = key(
        "addresses of servers of rollout.servers_api, as in [http://a:8000,http://b:8000], or ray for one that Ray starts, as in [ray,ray]; "
        "they draw in place of this run's processes, with the weights of each step; null: none",
        optional=True,
        acts=_GENERATES,
        contradicts=_server_faults,
        changes=Changes.experiment,
    )
    servers_api: ServerApi | None = key(
        "ztk: task=serve with serve.weights_path; vllm: vLLM 0.30 or later with VLLM_SERVER_DEV_MODE=1, or trl vllm-serve, which read the "
        "weights from the run folder",
        default=ServerApi.ztk,
        acts=_ASKS,
        changes=Changes.experiment,
    )
    servers_wait: float | None = key(
        "seconds without an answer of rollout.servers after which the run ends",
        default=600.0,
        range=POSITIVE,
        acts=_ASKS,
        changes=Changes.nothing,
    )
    servers_transfer: TransferName | None = key(
        "how weights reach rollout.servers: http: files that rank 0 sends; folder: files of the run folder, which they read under the same "
        "path below serve.weights_path; gloo: parts of tensors that each rank of a server pulls from the "
        "trainer's ranks, for servers that can connect to them",
        default=TransferName.http,
        acts=_ASKS,
        changes=Changes.nothing,
    )
    servers_key_variable: str | None = key(
        "environment variable with the key of rollout.servers, as serve.api_key_variable there; null: they need none",
        optional=True,
        acts=_ASKS,
        changes=Changes.nothing,
    )
    staleness: int | None = key(
        "rollouts that are drawn while the policy is updated on an earlier one, so that the weights of a token are at most so many rollouts "
        "older than those it trains; needs rollout.identity=corrected or off, and rollout.servers or, for 1, rollout.engine=generator on a CPU",
        default=0,
        range=COUNT_OR_ZERO,
    )
    late: LateName | None = key(
        "answers of rollout.servers that are under way when the next update needs them: carry: they go on with newer weights, and the update "
        "waits for their ends; cut: each ends after the token that is being drawn, at least one, and trains with its tokens so far",
        default=LateName.carry,
        acts=_ASKS_AHEAD,
    )
    identity: RolloutIdentity | None = key(
        "exact: the trainer's log-probabilities of a rollout must equal the stored ones bit for bit, or the run stops; corrected: their "
        "ratio weighs the loss (truncated importance sampling); off: neither",
        default=RolloutIdentity.exact,
    )
    correction: CorrectionName | None = key(
        "weights of rollout.identity=corrected: the ratio of probabilities of each token (token), or of each answer for all its tokens "
        "(sequence); above rollout.correction_max it is cut (truncate), or 0, and the token or answer does not count (mask)",
        default=CorrectionName.token_truncate,
        acts=_CORRECTS,
    )
    correction_max: float | None = key(
        "largest weight of rollout.identity=corrected", default=2.0, range=Range(low=1, float32=True), acts=_CORRECTS
    )
    experts: RolloutExperts | None = key(HELP, default=RolloutExperts.replay, acts=ROUTES)
    environment: str | None = key(
        "class whose instances answer the policy, for several turns and tools: FILE.py:CLASS or MODULE:CLASS with reset(prompt) and "
        "step(answer) -> observation, reward, done, either of them also async. Rewards of steps add up; null: an answer is one turn",
        optional=True,
        paths=ObjectNames(kind="CLASS", example="mine.py:Env", dotted=True),
    )
    max_turns: int | None = key("turns of the policy in an answer, at most", default=8, range=COUNT, acts=_PLAYS)
    drop_equal_groups: bool | None = key(
        "answers of a group with equal rewards do not count in the loss", contradicts=_group_faults
    )
    mask_truncated: bool | None = key(
        "answers that were cut at rollout.max_tokens, or by rollout.late=cut, do not count in the loss"
    )
    show_every: int | None = key(
        "steps between texts on screen and in samples.jsonl; 0: none",
        default=25,
        range=COUNT_OR_ZERO,
        changes=Changes.experiment,
    )
    stop_entropy_below: float | None = key(
        "the run stops when the mean entropy, nats per token, is below; null: never", range=POSITIVE, optional=True
    )
    stop_truncated_above: float | None = key(
        "the run stops when more than this fraction of the answers was cut at rollout.max_tokens; null: never",
        default=0.9,
        range=FRACTION,
        optional=True,
        changes=Changes.experiment,
    )
    stop_equal_steps: int | None = key(
        "the run stops when for so many rollouts in a row all answers to each prompt had equal rewards; null: never",
        default=5,
        range=COUNT,
        optional=True,
        changes=Changes.experiment,
    )
    save_completions: bool | None = key(
        "every answer of every rollout is written to completions.jsonl, and the answers of shown steps to the logger's table",
        default=False,
        changes=Changes.nothing,
    )
    completions_file: str | None = key(
        "name of a parquet file in the run folder that gets the lines of completions.jsonl, too, when the run ends; null: none",
        acts=_SAVES_COMPLETIONS,
        optional=True,
        contradicts=_file_faults,
        changes=Changes.nothing,
    )
    eval_every: int | None = key(
        "steps between evaluations, whose means are in the row as eval_reward and so on; 0: none",
        default=0,
        range=COUNT_OR_ZERO,
        changes=Changes.experiment,
    )
    eval_rollouts: int | None = key(
        "rollouts of an evaluation, of rollout.prompts prompts each", default=1, range=COUNT, acts=EVALUATED
    )


@dataclass(kw_only=True)
class WarmStartConfig:
    """Supervised steps before the first rollout, on answers of which some are wrong."""

    acts: ClassVar = _WARMING

    steps: int | None = key("supervised steps; 0: none", default=300, range=COUNT_OR_ZERO, acts=_WARMS)
    correct: float | None = key("fraction of the answers that are right", default=0.35, range=FRACTION)
    lr: float | None = key("learning rate of these steps", default=3.0e-3, range=POSITIVE)
    batch_size: int | None = key("examples per step, over all ranks", default=64, range=COUNT)
    path: str | None = key(
        "run folder or checkpoint of a decoder of this shape, whose parameters are the initial ones; null: drawn from train.seed",
        acts=_ALIGNS,
        optional=True,
        paths=Paths(kind="run", fix="name a run folder with checkpoints, or leave it out"),
    )


@dataclass(kw_only=True)
class AdvantageConfig:
    """How much better an answer is than expected."""

    acts: ClassVar = DRAWS

    baseline: BaselineName | None = key(
        "the expected reward: critic: a second model's value per token (GAE); mean: the group's mean; leave_one_out: the mean of the others",
        contradicts=_baseline_faults,
    )
    scale: AdvantageScale | None = key(
        "divide by the standard deviation of the group's rewards (group) or whiten over all answer tokens (batch)"
    )
    gamma: float | None = key("discount per token", range=FRACTION, acts=_PPO)
    lam: float | None = key("lambda of generalised advantage estimation", range=FRACTION, acts=_PPO)


@dataclass(kw_only=True)
class PolicyConfig:
    """The loss of the policy."""

    acts: ClassVar = DRAWS

    ratio: RatioName | None = key("ratio of probabilities per token, or its geometric mean per answer (GSPO)")
    form: PolicyForm | None = key("clipped: PPO's minimum; cispo: the clipped ratio as a constant weight")
    clip_low: float | None = key("the ratio is clipped at 1 - clip_low", range=FRACTION)
    clip_high: float | None = key("the ratio is clipped at 1 + clip_high", range=NOT_NEGATIVE)
    dual_clip: float | None = key(
        "bound on the ratio of negative advantages; null: none",
        range=Range(low=1, above=True, float32=True),
        acts=_CLIPS,
        optional=True,
    )
    average: AverageName | None = key(
        "sequence: mean over answers of means over tokens; tokens: mean over all tokens of the batch; constant: sum over "
        "(answers * rollout.max_tokens)"
    )


@dataclass(kw_only=True)
class KlConfig:
    """The KL divergence to the reference, the model as it was before the first rollout."""

    acts: ClassVar = DRAWS

    reference: ReferenceName | None = key(
        "frozen: a copy of the first weights (of the base model with lora=adapter); lora_off: with lora=adapter, the policy "
        "without its adapters, no second model; none: nothing is measured",
        default=ReferenceName.frozen,
        contradicts=_kl_faults,
    )
    coef: float | None = key("factor of the divergence; 0: it is measured alone", range=NOT_NEGATIVE)
    estimator: KlEstimator | None = key(
        "k1: log ratio; k2: half its square; k3: exp(-k1) - 1 + k1; k3_weighted: k3 times the ratio to the old policy, whose gradient is "
        "the divergence's",
        acts=_DIVERGES,
    )
    place: KlPlace | None = key("subtract it from each token's reward, or add it to the loss", acts=_DIVERGES)
    stop_above: float | None = key(
        "the run saves and stops above so many nats per answer; null: never", range=POSITIVE, optional=True
    )


@dataclass(kw_only=True)
class StrategyConfig:
    """Overrides of the policy's zero, offload and precision for a second model."""

    zero: StageName | None = key(
        "the ZeRO stage of the model; null: as zero.stage", optional=True, changes=Changes.experiment
    )
    offload: Tier | None = key(
        "where its shards are stored, at stage 3 its parameters, too; null: as offload",
        optional=True,
        changes=Changes.experiment,
    )
    precision: DType | None = key("dtype of its parameters; null: as precision.dtype", optional=True)


@dataclass(kw_only=True)
class ReferenceConfig(StrategyConfig):
    """The engine of kl.reference=frozen or dpo.reference=frozen, or of the teacher of task=distill, which never steps."""

    acts: ClassVar = _REFERENCE


@dataclass(kw_only=True)
class CriticConfig(StrategyConfig):
    """The second model of advantage.baseline=critic: an engine of its own with the policy's shape and first weights."""

    acts: ClassVar = _PPO

    lr: float | None = key("learning rate of the critic", range=POSITIVE)
    value_clip: float | None = key("a value may move by this much from the old one; 0: no clipping", range=NOT_NEGATIVE)
