"""Keys of a run: task, length, batch, evaluation, checkpoints, logging, ranks."""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from ztk.core.policies.key import Changes, When, key, section, tasks
from ztk.core.policies.paths import Paths
from ztk.core.policies.profile import ProfilePolicy
from ztk.core.policies.ranges import COUNT, COUNT_OR_ZERO, NOT_NEGATIVE, POSITIVE, SIZE_OR_ZERO, Range, member
from ztk.core.policies.runs import ANSWERING, AUTO, aligns, draws, holds_out, reads_lines, reads_records, trains

if TYPE_CHECKING:
    from ztk.core.policies.config import Config


class KernelBackend(StrEnum):
    """kernels: which implementation of an op runs."""

    auto = "auto"  # Triton on a GPU, torch's vectorised kernels on a CPU
    triton = "triton"  # Triton, or refuse
    reference = "reference"  # the plain torch reference everywhere


class LoggerMode(StrEnum):
    """logger.mode: the logger, and where wandb writes."""

    offline = "offline"
    online = "online"
    tensorboard = "tensorboard"
    csv = "csv"
    disabled = "disabled"


class Evaluated(StrEnum):
    """train.evaluate: the weights used for held-out losses and the text sample."""

    weights = "weights"  # the trained weights
    ema = "ema"  # their moving average


MOST_SECONDS = 31_536_000  # a year
_DAY, YEAR = Range(low=0, high=86_400, above=True), Range(low=0, high=MOST_SECONDS, above=True)
_TRAINS = When("tasks that train, such as task=pretrain", lambda config, machine: trains(config))
_EVALUATES = When(
    "data=stdlib, files, chat, preferences or own data, and without train.quick",
    lambda config, machine: (holds_out(config) or reads_records(config)) and not config.train.quick,
)
_COMPARES = When(
    "task=pretrain with data=stdlib, data=files or own data, and without train.quick",
    lambda config, machine: config.task.name == "pretrain" and holds_out(config) and not config.train.quick,
)
_SAVES_LAST = When(
    "tasks that train, such as task=pretrain, and zero=stage0 to stage3",
    lambda config, machine: trains(config) and config.zero.engine == "ztk",
)
_SAVES = When(
    "tasks that train, such as task=pretrain, and checkpoint=last or checkpoint=periodic",
    lambda config, machine: trains(config) and config.checkpoint.saves,
)
_SAVES_OFTEN = When("checkpoint.every above 0", lambda config, machine: config.checkpoint.every != 0)
_SAVES_BEST = When(
    "checkpoint.every above 0 and data=stdlib, files, chat, preferences, prompts or own data",
    lambda config, machine: config.checkpoint.every != 0 and (holds_out(config) or reads_lines(config)),
)
_JUDGES = When(
    "task=sft, reward, dpo, distill, grpo or ppo",
    lambda config, machine: aligns(config),
)
_RANKS = When(
    "task=sft, reward, dpo, distill, grpo or ppo with checkpoint.keep_best or train.patience",
    lambda config, machine: aligns(config) and bool(config.checkpoint.keep_best or config.train.patience is not None),
)
_LOGS = When("logger=offline, online, tensorboard or csv", lambda config, machine: config.logger.mode != "disabled")
_TO_WANDB = When("logger=offline or online", lambda config, machine: config.logger.mode in ("offline", "online"))


def _until_loss(config: "Config") -> Iterator[str]:
    train = config.train
    if train.until_loss is not None and not train.eval_every:
        yield (
            f"train.until_loss={train.until_loss:g} is compared at held-out evaluations, and train.eval_every={train.eval_every} makes none: "
            f"use train.eval_every={max(1, train.steps // 10)}"
        )


def _evaluate(config: "Config") -> Iterator[str]:
    train = config.train
    if train.evaluate is Evaluated.ema and not config.ema.decay:
        yield "train.evaluate=ema has no average to evaluate: use ema.decay=0.999, or train.evaluate=weights"


def _profile(config: "Config") -> Iterator[str]:
    text, steps = config.train.profile, config.train.steps
    try:
        profile = ProfilePolicy.of(text)
    except ValueError as error:
        yield str(error)
        return
    if profile.last > steps:
        fitting = f"{min(profile.first, steps)}:{steps}"
        yield f"train.profile={text} ends after the last step: use train.profile={fitting}, or train.steps={profile.last}"


def _accumulation(config: "Config") -> Iterator[str]:
    train = config.train
    if train.global_batch_size is not None and train.accumulation_steps is not None:
        yield (
            f"train.accumulation_steps={train.accumulation_steps} has no effect with "
            f"train.global_batch_size={train.global_batch_size}, which sets the number of forwards: leave one out"
        )


def _every(config: "Config") -> Iterator[str]:
    checkpoint, train = config.checkpoint, config.train
    if checkpoint.every > train.steps and not checkpoint.last:
        yield (
            f"checkpoint.every={checkpoint.every} would never come with train.steps={train.steps}: "
            f"use checkpoint.every={train.steps}, or checkpoint.every=0"
        )


def _rows(config: "Config") -> Iterator[str]:
    if draws(config) and config.train.log_every != 1:
        yield f"train.log_every={config.train.log_every}: task={config.task.name} has a row for every step; use train.log_every=1"


def _asynchronous(config: "Config") -> Iterator[str]:
    if draws(config) and config.checkpoint.asynchronous:
        yield (
            f"checkpoint.asynchronous=true: task={config.task.name} saves a critic or a reference together with the policy; use "
            "checkpoint.asynchronous=false"
        )


def _local(config: "Config") -> Iterator[str]:
    if config.checkpoint.local and config.launch.starter != "local":
        yield (
            f"checkpoint.local=true: launch={config.launch.starter} needs a run folder that all machines share; leave checkpoint.local out, "
            "or start the ranks by torchrun or srun"
        )


def _keep_every(config: "Config") -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.every and checkpoint.keep_every and checkpoint.keep_every % checkpoint.every:
        yield (
            f"checkpoint.keep_every={checkpoint.keep_every} is not a multiple of checkpoint.every={checkpoint.every}, which makes the "
            f"checkpoints: use checkpoint.keep_every={-(-checkpoint.keep_every // checkpoint.every) * checkpoint.every}"
        )


def _patience(config: "Config") -> Iterator[str]:
    every = config.rollout.eval_every if config.task.name in ("grpo", "ppo") else config.train.eval_every
    if not every:
        key = "rollout.eval_every" if config.task.name in ("grpo", "ppo") else "train.eval_every"
        yield f"train.patience={config.train.patience}: counts evaluations, and this run makes none; use {key}=25, or train.patience=null"


def _keep_best(config: "Config") -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.keep_best and config.train.quick:
        yield "checkpoint.keep_best=true has nothing to measure with train.quick=true: use checkpoint.keep_best=false"
    if checkpoint.keep_best and config.data.validation_fraction == 0 and config.task.name not in ("grpo", "ppo"):
        yield (
            "checkpoint.keep_best=true has nothing to measure with data.validation_fraction=0: use checkpoint.keep_best=false, or "
            "data.validation_fraction=0.05"
        )


def _installed(config: "Config") -> Iterator[str]:
    if config.logger.mode is LoggerMode.tensorboard and importlib.util.find_spec("tensorboard") is None:
        yield 'logger=tensorboard needs the package tensorboard: pip install "ztk[tensorboard]", or use logger=csv'


def _logged(config: "Config") -> Iterator[str]:
    train = config.train
    logger = config.logger
    if (
        logger.mode is not LoggerMode.disabled
        and logger.every
        and train.log_every > 0
        and logger.every % train.log_every
    ):
        yield (
            f"logger.every={logger.every} is not a multiple of train.log_every={train.log_every}, which makes the "
            f"rows: use logger.every={-(-logger.every // train.log_every) * train.log_every}"
        )


def _timed(config: "Config") -> Iterator[str]:
    every, train, logger = config.kernels.log_every or 0, config.train, config.logger
    if every <= 0 or not trains(config):
        return
    asked = f"kernels.log_every={every}"
    if train.log_every > 0 and every % train.log_every:
        fitting = -(-every // train.log_every) * train.log_every
        yield f"{asked} is not a multiple of train.log_every={train.log_every}, which makes the rows: use kernels.log_every={fitting}"
    elif logger.mode is not LoggerMode.disabled and logger.every and logger.every > 0 and every % logger.every:
        fitting = -(-every // logger.every) * logger.every
        yield f"{asked} is not a multiple of logger.every={logger.every}, which the logger gets: use kernels.log_every={fitting}"
    if every > train.steps > 0:
        yield f"{asked} is more than train.steps={train.steps}, so no step would be timed: use kernels.log_every={train.steps}"
    if config.kernels.backend is KernelBackend.reference:
        yield f"{asked} times ztk's operations and kernels=reference uses none: use kernels=auto, or kernels.log_every=0"


@dataclass(kw_only=True)
class TaskConfig:
    """The program that every rank runs."""

    changes: ClassVar = Changes.experiment

    name: str = key("name of the task, wandb's job type", default=MISSING)
    module: str = key("module to import; every rank calls its main(config)", default=MISSING)


@dataclass(kw_only=True)
class TrainConfig:
    """Length, batch and evaluation of a run. `train` has no options, only keys."""

    steps: int = key("optimizer steps", default=300, range=Range(low=1, high=2**24), changes=Changes.experiment)
    micro_batch_size: int = key(
        "sequences per rank and forward, at most", default=8, range=COUNT, changes=Changes.experiment
    )
    accumulation_steps: int | None = key(
        "forwards per optimizer step; null: 1, or as many as train.global_batch_size takes",
        range=COUNT,
        changes=Changes.experiment,
        contradicts=_accumulation,
    )
    global_batch_size: int | None = key(
        "sequences per optimizer step over all ranks, any number; null: replicas * micro_batch_size * accumulation_steps",
        range=COUNT,
    )
    seed: int = key("seed of the initial weights and of the order of the data", default=0, range=SIZE_OR_ZERO)
    log_every: int = key(
        "steps between rows of metrics.jsonl", default=1, range=COUNT, changes=Changes.experiment, contradicts=_rows
    )
    eval_every: int | None = key(
        "steps between held-out evaluations, one more follows the last step; 0: that one alone",
        default=100,
        range=COUNT_OR_ZERO,
        acts=_EVALUATES,
        idle=0,
        changes=Changes.experiment,
    )
    eval_batches: int | None = key(
        "global batches of one evaluation", default=8, range=COUNT, acts=_EVALUATES, changes=Changes.experiment
    )
    max_seconds: float | None = key(
        "seconds of training after which the run ends, counted from this start; the current step is finished; null: no limit",
        range=YEAR,
        acts=tasks("pretrain"),
        optional=True,
        changes=Changes.experiment,
    )
    until_loss: float | None = key(
        "held-out loss at which the run ends, compared at every evaluation; null: none",
        range=POSITIVE,
        acts=_COMPARES,
        optional=True,
        changes=Changes.experiment,
        contradicts=_until_loss,
    )
    evaluate: Evaluated | None = key(
        "weights of held-out losses and the text sample: weights: the trained ones; ema: their moving average, see ema.decay; null: weights",
        acts=_COMPARES,
        optional=True,
        changes=Changes.experiment,
        contradicts=_evaluate,
    )
    patience: int | None = key(
        "evaluations without a better checkpoint.metric after which the run ends; null: none",
        range=COUNT,
        acts=_JUDGES,
        optional=True,
        changes=Changes.experiment,
        contradicts=_patience,
    )
    quick: bool | None = key(
        "no evaluation, no sample of text and no picture, for comparisons of speed; null: false",
        acts=tasks("pretrain"),
        optional=True,
        changes=Changes.experiment,
    )
    profile: str | None = key(
        "START:STOP: every rank writes a trace and a memory timeline of the steps START to STOP into the folder profile; null: none",
        acts=_TRAINS,
        optional=True,
        changes=Changes.nothing,
        contradicts=_profile,
    )
    z_loss: float | None = key(
        "weight of the mean squared logsumexp of the output logits, added to the training loss; 1e-4 in PaLM; null or 0: none",
        range=NOT_NEGATIVE,
        acts=When("task=pretrain", lambda config, machine: config.task.name in ("pretrain", "plan")),
        optional=True,
    )


@dataclass(kw_only=True)
class KernelsConfig:
    """The implementation of ztk's operations."""

    changes: ClassVar = Changes.experiment

    backend: KernelBackend = key(
        "auto: Triton on a GPU, torch's vectorised kernels on a CPU; triton: Triton or refuse; reference: plain torch",
        default=MISSING,
    )
    log_every: int | None = key(
        "steps between those whose operations are timed, a multiple of train.log_every: milliseconds, calls, rate and share of the floor of "
        "each; 0: none",
        default=0,
        range=COUNT_OR_ZERO,
        acts=When(_TRAINS.words, lambda config, machine: config.task.name not in ANSWERING),
        changes=Changes.nothing,
        contradicts=_timed,
    )


@dataclass(kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    changes: ClassVar = Changes.experiment

    every: int = key("steps between checkpoints; 0: none", default=MISSING, range=COUNT_OR_ZERO, contradicts=_every)
    last: bool | None = key(
        "the last step is saved, however the run ends",
        default=True,
        acts=_SAVES_LAST,
        optional=True,
        idle=False,
        changes=Changes.nothing,
    )
    grace_seconds: float | None = key(
        "seconds after Ctrl-C or SIGTERM to finish and save the current step; a second signal ends the run at once",
        default=30.0,
        range=_DAY,
        acts=_SAVES,
        changes=Changes.nothing,
    )
    keep: int | None = key("how many of the newest are kept", default=2, range=COUNT, acts=_SAVES_OFTEN)
    keep_every: int | None = key(
        "steps between further checkpoints that are kept for good; 0: none",
        default=0,
        range=COUNT_OR_ZERO,
        acts=_SAVES_OFTEN,
        contradicts=_keep_every,
    )
    keep_best: bool | None = key(
        "also keep the checkpoint with the smallest held-out loss, or the best checkpoint.metric, which is then measured before every save",
        default=False,
        acts=_SAVES_BEST,
        contradicts=_keep_best,
    )
    metric: str | None = key(
        "value of a row that checkpoint.keep_best and train.patience go by; null: validation_loss, of task=grpo and ppo eval_reward",
        acts=_RANKS,
        optional=True,
    )
    higher_is_better: bool | None = key(
        "whether larger values of checkpoint.metric are better; null: of rewards, accuracies and margins",
        acts=_RANKS,
        optional=True,
    )
    asynchronous: bool | None = key(
        "training continues while the files are written", default=False, acts=_SAVES_OFTEN, contradicts=_asynchronous
    )
    local: bool | None = key(
        "each node keeps the checkpoints of its ranks in a folder of its own, at the path of the run folder",
        default=False,
        acts=_SAVES,
        changes=Changes.nothing,
        contradicts=_local,
    )
    resume: str | None = key(
        "run folder or checkpoint to continue from; auto: the run folder's own latest if it has one; overwrite: a new run in place of the "
        "folder's; null: from the start, or as auto in a folder with a checkpoint of the same experiment and after a restart",
        changes=Changes.nothing,
        paths=Paths(
            kind="run",
            words=(AUTO,),
            fix="name a run folder with checkpoints, or checkpoint.resume=auto for the run's own, or leave it out",
        ),
    )
    allow_changes: bool | None = key(
        "continue although keys that change numbers, such as optimizer.lr, differ from the checkpoint's run",
        acts=When("checkpoint.resume", lambda config, machine: config.checkpoint.resume is not None),
        optional=True,
        changes=Changes.nothing,
    )

    @property
    def saves(self) -> bool:
        """Whether the run writes checkpoints."""
        return bool(self.every or self.last)


@dataclass(frozen=True, kw_only=True)
class TrackerPolicy:
    """The logger of a run and the description of the run for it.

    group: the sweep that the run belongs to. name: its overrides, joined. job_type: its task. config: every option, resolved. Only wandb
    uses project, group, name and job_type.

    Raises:
        ValueError: an unknown mode.
    """

    mode: LoggerMode = key(
        "offline: wandb writes into the run folder; online: to its server, needs a login; tensorboard: event files in the run folder; "
        "csv: metrics.csv there; disabled: none",
        default=LoggerMode.offline,
        chosen=True,
        contradicts=_installed,
    )
    project: str = key("wandb's project", default="ztk", acts=_TO_WANDB)
    group: str | None = None
    name: str | None = None
    job_type: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", member(self.mode, of=LoggerMode, key="logger.mode"))


@section
class LoggerConfig(TrackerPolicy):
    """Loggers. metrics.jsonl and summary.json are written in any case."""

    changes: ClassVar = Changes.nothing

    every: int | None = key(
        "steps between rows given to the logger, a multiple of train.log_every",
        range=COUNT,
        acts=_LOGS,
        contradicts=_logged,
    )
