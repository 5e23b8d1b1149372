"""What fits together. Every rule yields one line per fault, and every line names the override that fixes it. Rules of policies are
theirs (`ztk.core.policies`); here are those that only a run has."""

import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ztk.config.adapters import lora_faults
from ztk.config.alignment import alignment_faults
from ztk.config.answering import answering_faults
from ztk.config.batch import AUTO, checkpoint_fault
from ztk.config.effects import device_of, effect_faults, offloads, others_offload
from ztk.config.ema_schema import Evaluated
from ztk.config.hugging_face import hugging_face_faults, is_hugging_face
from ztk.config.kernels import kernel_faults
from ztk.config.keys import data_paths, read, written
from ztk.config.machine import Machine
from ztk.config.optimizer_schema import OptimizerName
from ztk.config.own import is_own_key, own_faults
from ztk.config.plan_schema import PLAN_RANGES
from ztk.config.planning import PLAN, planning_faults
from ztk.config.precision_schema import DType, LossScaleConfig
from ztk.config.program import module_faults
from ztk.config.rollout import rollout_faults
from ztk.config.scheduler_schema import SchedulerName
from ztk.config.schema import (
    Config,
    DataName,
    KernelBackend,
    LoggerMode,
    ZeroEngine,
)
from ztk.config.sweep_schema import SWEEP_RANGES
from ztk.config.text import has_tokenizer
from ztk.config.text_rules import text_faults
from ztk.config.topology import topology_faults
from ztk.core.policies import (
    align,
    ema,
    hardware,
    inference,
    layout,
    loss_scale,
    offload,
    optimizer,
    pipeline,
    recompute,
    rollout,
    schedule,
    text,
    zero,
)
from ztk.core.policies.compact import compact_faults
from ztk.core.policies.profile import ProfilePolicy
from ztk.core.policies.ranges import (
    BELOW_ONE,
    COUNT,
    COUNT_OR_ZERO,
    NOT_NEGATIVE,
    POSITIVE,
    SIZE_OR_ZERO,
    Range,
    shown,
)
from ztk.core.policies.tier import Tier


class ConfigError(ValueError):
    """The configuration is refused; the text lists every fault."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = tuple(faults)
        title = "the configuration is refused:" if len(faults) > 1 else "the configuration is refused: "
        super().__init__(title + ("\n  - " + "\n  - ".join(faults) if len(faults) > 1 else faults[0]))

    def __reduce__(self) -> tuple:
        return (ConfigError, (list(self.faults),))


def _of(section: str, *, ranges: Mapping[str, Range]) -> dict[str, Range]:
    return {f"{section}.{name}": allowed for name, allowed in ranges.items()}


# Policies own the ranges of what they choose. Here stand those of keys that no policy takes.
RANGES = {
    **_of("zero", ranges=zero.RANGES),
    **_of("offload", ranges=offload.RANGES),
    **_of("precision.loss_scale", ranges={k: v for k, v in loss_scale.RANGES.items() if k in vars(LossScaleConfig())}),
    **_of("recompute", ranges=recompute.RANGES),
    **_of("optimizer", ranges=optimizer.RANGES | optimizer.CLIP_RANGES | optimizer.MUON_RANGES),
    **_of("scheduler", ranges=schedule.RANGES),
    **_of("topology", ranges=pipeline.RANGES),
    **{f"topology.{name}": COUNT for name in ("pipeline", "tensor", "sequence", "context", "expert", "data")},
    **{
        f"model.{name}": COUNT
        for name in ("vocab_size", "dim", "layers", "heads", "kv_heads", "hidden_dim", "max_seq_len")
    },
    **{f"model.{name}": COUNT for name in ("experts", "experts_per_token", "experts_every", "expert_hidden_dim")},
    "model.shared_hidden_dim": COUNT_OR_ZERO,
    "model.balance_loss_weight": NOT_NEGATIVE,
    "model.router_z_loss_weight": NOT_NEGATIVE,
    "model.rope_theta": POSITIVE,
    "model.norm_eps": POSITIVE,
    "lora.rank": Range(low=0, high=65_536),
    "lora.alpha": POSITIVE,
    "lora.dropout": BELOW_ONE,
    **_of("data", ranges=text.RANGES),
    "data.validation_fraction": BELOW_ONE,
    "data.seq_len": COUNT,
    "train.steps": Range(low=1, high=2**24),  # the step counter on the device is float32: exact up to here
    "train.micro_batch_size": COUNT,
    "train.accumulation_steps": COUNT,
    "train.global_batch_size": COUNT,
    "train.seed": SIZE_OR_ZERO,
    "train.log_every": COUNT,
    "train.eval_every": COUNT_OR_ZERO,
    "train.eval_batches": COUNT,
    "train.max_seconds": Range(low=0, high=31_536_000, above=True),  # a year
    "train.until_loss": POSITIVE,
    "train.z_loss": NOT_NEGATIVE,
    **_of("ema", ranges=ema.RANGES),
    "checkpoint.every": COUNT_OR_ZERO,
    "checkpoint.grace_seconds": Range(low=0, high=86_400, above=True),  # a day
    "checkpoint.keep": COUNT,
    "checkpoint.keep_every": COUNT_OR_ZERO,
    "logger.every": COUNT,
    "kernels.log_every": COUNT_OR_ZERO,
    "launch.ranks": Range(low=1, high=65_536),
    "launch.threads": Range(low=1, high=4096),  # of each rank
    "launch.min_ranks": Range(low=1, high=65_536),
    **rollout.RANGES,
    **_of("inference", ranges=inference.RANGES),
    **_of("sampling", ranges=inference.SAMPLING_RANGES),
    **_of("serve", ranges=inference.SERVE_RANGES),
    **_of("eval", ranges=inference.EVAL_RANGES),
    **align.RANGES,
    **_of("hardware", ranges=hardware.RANGES),
    **PLAN_RANGES,
    "launch.timeout_seconds": Range(low=0, high=31_536_000, above=True),  # a year
}


def range_of(key: str) -> str:
    """The numbers that a key accepts, in words; empty if its type says all."""
    if key == "optimizer.betas":
        return "two of 0 or more and below 1"
    if key in ("offload.buffer_bytes", "offload.block_bytes"):
        return f"a multiple of {offload.PAGE_BYTES}"
    allowed = RANGES.get(key) or SWEEP_RANGES.get(key)
    return allowed.brief if allowed else ""


def check(config: Config, *, given: frozenset[str], machine: Machine) -> None:
    """Raises ConfigError with all faults of `config`.

    given: the keys that the user set, apart from choosing options: what is in there and cannot act is a fault.
    """
    faults = list(_range_faults(config)) + effect_faults(config, given=given, machine=machine)
    faults += topology_faults(config, given=given, machine=machine)
    faults += answering_faults(config, given=given, machine=machine)
    faults += own_faults(config)
    faults += [fault for rule in _RULES for fault in rule(config, machine=machine)]
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))


def _range_faults(config: Config) -> Iterator[str]:
    for key, allowed in RANGES.items():
        value = None if is_own_key(config, key=key) else read(config, key=key)
        if value is not None and (reason := allowed.fault(value)):
            yield f"{key}={shown(written(value))}: {reason}"
    yield from optimizer.beta_faults(config.optimizer.betas)


def _task(config: Config, machine: Machine) -> Iterator[str]:
    yield from module_faults(config.task.module)


def _zero_and_offload(config: Config, machine: Machine) -> Iterator[str]:
    if config.zero.engine is not ZeroEngine.ztk:
        name = config.zero.engine.value
        if config.offload.optimizer is not Tier.none or config.offload.parameters not in ("none", "auto"):
            yield (
                f"offload: zero={name} has no offload; use zero=stage0 to stage3, or offload=none and leave out offload.optimizer and "
                "offload.parameters"
            )
        if config.optimizer.name is OptimizerName.lion:
            yield f"optimizer=lion: torch has none for zero={name}; use zero=stage0 to stage3, or optimizer=adamw"
        if config.optimizer.name is OptimizerName.lamb:
            yield f"optimizer=lamb: torch has none for zero={name}; use zero=stage0 to stage3, or optimizer=adamw"
        if config.optimizer.name is OptimizerName.muon:
            yield f"optimizer=muon: torch's does not run with zero={name}; use zero=stage0 to stage3, or optimizer=adamw"
        if config.optimizer.states not in (None, "fp32") or config.precision.master is not None:
            yield (
                f"optimizer.states and precision.master: zero={name} runs torch's AdamW on float32 weights; use zero=stage0 to stage3, or "
                "optimizer.states=fp32 without precision.master"
            )
        if config.checkpoint.every or config.checkpoint.resume is not None:
            yield (
                f"checkpoint: zero={name} is there to compare with and neither saves nor loads; use zero=stage0 to "
                "stage3, or leave out checkpoint.every and checkpoint.resume"
            )
        return
    yield from layout.offload_faults(config.offload, zero=config.zero)


def _nvme(config: Config, machine: Machine) -> Iterator[str]:
    if not offloads(config, tier=Tier.nvme) and not others_offload(config, tier=Tier.nvme):
        return
    yield from offload.page_faults(config.offload)
    folder = Path(config.offload.nvme_path or config.output_dir).expanduser().absolute()
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        yield (
            f"offload.nvme_path={folder}: {existing} is not a folder that can be written to; "
            "use offload.nvme_path=FOLDER on a writable disk, or offload=cpu"
        )


def _precision(config: Config, machine: Machine) -> Iterator[str]:
    states = config.optimizer.states
    if config.zero.engine is ZeroEngine.ztk:
        yield from compact_faults(
            name=config.optimizer.name.value,
            states=states.value if states is not None and config.optimizer.name is OptimizerName.adamw else "fp32",
            master=config.precision.master and config.precision.master.value,
            dtype=config.precision.dtype.value,
            averages=bool(config.ema.decay),
        )
    scale = config.precision.loss_scale
    dynamic = config.precision.dtype is DType.fp16 and scale.dynamic and scale.initial and scale.floor
    if dynamic and scale.initial < scale.floor:
        yield (
            f"precision.loss_scale.initial={scale.initial:g} lies below "
            f"precision.loss_scale.floor={scale.floor:g}: use precision.loss_scale.floor={scale.initial:g}"
        )


def _model(config: Config, machine: Machine) -> Iterator[str]:
    model, data = config.model, config.data
    yield from lora_faults(config)
    if is_hugging_face(model):
        yield from hugging_face_faults(config)
        return
    if model.heads > 0 and model.dim > 0:
        if model.dim % model.heads:
            fixed = max(1, model.dim // model.heads) * model.heads
            yield f"model.dim={model.dim} is not a multiple of model.heads={model.heads}: use model.dim={fixed}"
        elif model.dim // model.heads % 2:
            yield (
                f"model.dim={model.dim} with model.heads={model.heads} gives heads of odd size, which rotary "
                f"embedding cannot turn: use model.dim={model.dim + model.heads}"
            )
    if model.kv_heads > 0 and model.heads % model.kv_heads:
        yield (
            f"model.heads={model.heads} is not a multiple of model.kv_heads={model.kv_heads}: "
            f"use model.kv_heads={model.heads}"
        )
    if model.experts is not None and model.experts < (model.experts_per_token or 1):
        yield (
            f"model.experts_per_token={model.experts_per_token} is more than model.experts={model.experts}: "
            f"use model.experts_per_token={model.experts}"
        )
    if model.experts is not None and model.layers < (model.experts_every or 1):
        yield (
            f"model.experts_every={model.experts_every} with model.layers={model.layers} leaves no block with experts: "
            f"use model.experts_every={model.layers}"
        )
    if data.seq_len > model.max_seq_len:
        yield (
            f"data.seq_len={data.seq_len} is longer than model.max_seq_len={model.max_seq_len}: "
            f"use data.seq_len={model.max_seq_len}, or model.max_seq_len={data.seq_len}"
        )
    if data.name is not DataName.synthetic and not has_tokenizer(config) and 0 < model.vocab_size < 256:
        yield f"model.vocab_size={model.vocab_size}: text is read as bytes, use model.vocab_size=256, or data=synthetic"


def _data(config: Config, machine: Machine) -> Iterator[str]:
    if config.data.name not in (DataName.files, DataName.prompts, DataName.chat, DataName.preferences):
        return
    if config.data.path is None:
        if config.data.name is not DataName.files:
            return
        yield "data=files reads what data.path names, and it names nothing: use data.path=FOLDER, a file or a glob, or data=stdlib"
        return
    for entry in data_paths(config):
        if not entry or not (os.path.exists(os.path.expanduser(entry)) or _matches(entry)):
            yield f"data.path={entry}: no such file or folder, and no file matches (from {os.getcwd()}): name others"


def _matches(pattern: str) -> bool:
    return next(glob.iglob(os.path.expanduser(pattern), recursive=True), None) is not None


def _runs_to_start_from(config: Config) -> Iterator[str]:
    for key, path in (("warm_start.path", config.warm_start.path), ("reward.path", config.reward.path)):
        if path is not None and not os.path.exists(os.path.expanduser(path)):
            yield f"{key}={path}: no such folder (from {os.getcwd()}); name a run folder with checkpoints, or leave it out"
        elif path is not None:
            yield from checkpoint_fault(path, key=key)


def _profile_faults(text: str | None, *, steps: int) -> Iterator[str]:
    if text is None:
        return
    try:
        profile = ProfilePolicy.of(text)
    except ValueError as error:
        yield str(error)
        return
    if profile.last > steps:
        fitting = f"{min(profile.first, steps)}:{steps}"
        yield f"train.profile={text} ends behind the last step: use train.profile={fitting}, or train.steps={profile.last}"


def _training(config: Config, machine: Machine) -> Iterator[str]:
    train, checkpoint = config.train, config.checkpoint
    holds_out = config.data.name in (DataName.stdlib, DataName.files) or config.data.path is not None
    if holds_out and config.data.validation_fraction == 0 and train.eval_every:
        yield (
            f"train.eval_every={train.eval_every} has nothing to evaluate with data.validation_fraction=0: "
            "use train.eval_every=0, or data.validation_fraction=0.05"
        )
    if train.until_loss is not None and not train.eval_every:
        yield (
            f"train.until_loss={train.until_loss:g} is compared at held-out evaluations, and train.eval_every={train.eval_every} makes none: "
            f"use train.eval_every={max(1, train.steps // 10)}"
        )
    yield from _profile_faults(train.profile, steps=train.steps)
    if train.evaluate is Evaluated.ema and not config.ema.decay:
        yield "train.evaluate=ema has no average to evaluate: use ema.decay=0.999, or train.evaluate=weights"
    if config.ema.every is not None and config.ema.every > train.steps:
        yield (
            f"ema.every={config.ema.every} would never come with train.steps={train.steps}: use ema.every=1, or leave out ema.decay"
        )
    if checkpoint.keep_best and config.train.quick:
        yield "checkpoint.keep_best=true has nothing to measure with train.quick=true: use checkpoint.keep_best=false"
    if checkpoint.keep_best and config.data.validation_fraction == 0:
        yield (
            "checkpoint.keep_best=true has nothing to measure with data.validation_fraction=0: use checkpoint.keep_best=false, or "
            "data.validation_fraction=0.05"
        )
    if checkpoint.every and checkpoint.keep_every and checkpoint.keep_every % checkpoint.every:
        yield (
            f"checkpoint.keep_every={checkpoint.keep_every} is not a multiple of checkpoint.every={checkpoint.every}, which makes the "
            f"checkpoints: use checkpoint.keep_every={-(-checkpoint.keep_every // checkpoint.every) * checkpoint.every}"
        )
    if checkpoint.every > train.steps and not checkpoint.last:
        yield (
            f"checkpoint.every={checkpoint.every} would never come with train.steps={train.steps}: "
            f"use checkpoint.every={train.steps}, or checkpoint.every=0"
        )
    if train.global_batch_size is not None and train.accumulation_steps is not None:
        yield (
            f"train.accumulation_steps={train.accumulation_steps} has no effect beside "
            f"train.global_batch_size={train.global_batch_size}, which takes as many forwards as it needs: leave one out"
        )
    if checkpoint.resume not in (None, AUTO) and not os.path.exists(os.path.expanduser(checkpoint.resume)):
        yield (
            f"checkpoint.resume={checkpoint.resume}: no such folder (from {os.getcwd()}); name a run folder with "
            "checkpoints, or checkpoint.resume=auto for the run's own, or leave it out"
        )
    elif checkpoint.resume not in (None, AUTO):
        yield from checkpoint_fault(checkpoint.resume, key="checkpoint.resume")
    yield from _runs_to_start_from(config)
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


def _optimizer(config: Config, machine: Machine) -> Iterator[str]:
    scheduler = config.scheduler
    if config.optimizer.name in (OptimizerName.sgd, OptimizerName.muon):
        yield from optimizer.nesterov_faults(nesterov=config.optimizer.nesterov, momentum=config.optimizer.momentum)
    if config.optimizer.name is OptimizerName.lamb:
        yield from optimizer.coefficient_faults(low=config.optimizer.min_coeff, high=config.optimizer.max_coeff)
        for degree in ("tensor", "expert"):
            if (value := getattr(config.topology, degree)) > 1:
                yield (
                    f"optimizer=lamb takes norms of full parameters, and topology.{degree}={value} cuts them: use "
                    f"topology.{degree}=1, or optimizer=adamw"
                )
    if config.optimizer.name is OptimizerName.muon:
        yield from optimizer.pattern_faults(config.optimizer.adam_names)
    end = config.train.steps if scheduler.total_steps is None else scheduler.total_steps
    if scheduler.warmup_steps is not None and scheduler.warmup_steps >= end > 0:
        key = "train.steps" if scheduler.total_steps is None else "scheduler.total_steps"
        yield (
            f"scheduler.warmup_steps={scheduler.warmup_steps} leaves nothing of {key}={end}: "
            f"use scheduler.warmup_steps={max(0, end // 10)}, or {key}={scheduler.warmup_steps * 10}"
        )
    if scheduler.warmup_shape == "log" and scheduler.warmup_steps == 1:
        yield (
            "scheduler.warmup_shape=log needs two steps or more: use scheduler.warmup_steps=2, or "
            "scheduler.warmup_shape=linear"
        )
    if scheduler.name is SchedulerName.wsd:
        warmup = config.train.steps // 20 if scheduler.warmup_steps is None else scheduler.warmup_steps
        yield from schedule.shape_faults(shape=scheduler.decay_shape, final=scheduler.final)
        yield from schedule.room_faults(
            warmup=warmup, decay=schedule.wsd_steps(scheduler.decay_steps, end=end), end=end
        )
    if scheduler.name is SchedulerName.one_cycle:
        yield from schedule.decay_faults(rate=scheduler.decay_rate, interval=scheduler.decay_interval)


def _launch(config: Config, machine: Machine) -> Iterator[str]:
    launch = config.launch
    device = device_of(config, machine=machine)
    if config.task.name == PLAN:
        return  # it starts no rank
    if machine.started_ranks and launch.ranks not in (None, machine.started_ranks):
        yield (
            f"launch.ranks={launch.ranks} has no effect on the {machine.started_ranks} ranks that are already started: "
            "leave it out, or start by `python run.py`"
        )
    if device == "cuda" and not machine.gpus:
        yield "launch.device=cuda: there is no GPU that the installed torch can use; use launch.device=cpu"
    elif device == "cuda" and not machine.started_ranks and launch.ranks and launch.ranks > machine.gpus:
        yield (
            f"launch.ranks={launch.ranks} with {machine.gpus} GPUs: use launch.ranks={machine.gpus}, or "
            "launch.device=cpu"
        )
    if launch.elastic and not config.checkpoint.every:
        yield (
            "launch.elastic=true has nothing to go on from without checkpoints: use checkpoint=periodic, or "
            "checkpoint.every=N"
        )
    if launch.elastic and launch.ranks and launch.min_ranks and launch.min_ranks > launch.ranks:
        yield f"launch.min_ranks={launch.min_ranks} with launch.ranks={launch.ranks}: use launch.min_ranks={launch.ranks}"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if config.kernels.backend is KernelBackend.triton and device == "cpu" and not interpreted:
        yield "kernels=triton needs a GPU: use kernels=auto (torch's kernels on a CPU), or kernels=reference"


_RULES = (
    _task,
    _zero_and_offload,
    _nvme,
    _precision,
    _model,
    _data,
    _training,
    _optimizer,
    _launch,
    kernel_faults,
    rollout_faults,
    alignment_faults,
    text_faults,
    planning_faults,
)
