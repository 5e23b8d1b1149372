"""What fits together. Every rule yields one line per fault, and every line names the override that mends it."""

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ztk.config.batch import AUTO
from ztk.config.effects import device_of, effect_faults, offloads
from ztk.config.keys import read, written
from ztk.config.machine import Machine
from ztk.config.schema import (
    Config,
    DataName,
    DType,
    KernelBackend,
    LoggerMode,
    OffloadTier,
    OptimizerName,
    ParameterTier,
    SchedulerName,
    ZeroEngine,
)
from ztk.config.topology import topology_faults

_PAGE_BYTES = 4096


class ConfigError(ValueError):
    """The configuration is refused; the text lists every fault."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = tuple(faults)
        title = "the configuration is refused:" if len(faults) > 1 else "the configuration is refused: "
        super().__init__(title + ("\n  - " + "\n  - ".join(faults) if len(faults) > 1 else faults[0]))

    def __reduce__(self) -> tuple:
        return (ConfigError, (list(self.faults),))


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """From `low` to `high`; `below` leaves `high` itself out and `above` leaves `low` out."""

    low: float
    high: float | None = None
    above: bool = False
    below: bool = False

    def holds(self, value: float) -> bool:
        if not (value > self.low or (value == self.low and not self.above)):
            return False
        return self.high is None or value < self.high or (value == self.high and not self.below)

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.above else f"{self.low:g} or more"
        high = "" if self.high is None else f" and {'below' if self.below else 'at most'} {self.high:g}"
        return low + high


_ONE = Range(low=1)
_ZERO = Range(low=0)
_FRACTION = Range(low=0, high=1)
_POSITIVE = Range(low=0, above=True)
_RANGES = {
    "zero.stage": Range(low=0, high=3),
    "zero.bucket_size": _ONE,
    "zero.prefetch_bucket_size": _ZERO,
    "zero.max_live_parameters": _ZERO,
    "zero.max_reuse_distance": _ZERO,
    "zero.param_persistence_threshold": _ZERO,
    "zero.hpz_partition_size": _ONE,
    "offload.buffer_count": Range(low=3),
    "offload.threads": _ONE,
    "precision.loss_scale.initial": _POSITIVE,
    "precision.loss_scale.window": _ONE,
    "precision.loss_scale.hysteresis": _ONE,
    "precision.loss_scale.floor": _POSITIVE,
    **{
        f"model.{name}": _ONE
        for name in ("vocab_size", "dim", "layers", "heads", "kv_heads", "hidden_dim", "max_seq_len")
    },
    **{f"model.{name}": _ONE for name in ("experts", "experts_per_token", "experts_every", "expert_hidden_dim")},
    **{f"model.{name}": _ZERO for name in ("shared_hidden_dim", "balance_loss_weight", "router_z_loss_weight")},
    "model.rope_theta": _POSITIVE,
    "model.norm_eps": _POSITIVE,
    **{f"topology.{name}": _ONE for name in ("pipeline", "tensor", "sequence", "expert", "data", "virtual_stages")},
    "topology.max_local_gradients": _ZERO,
    "data.validation_fraction": Range(low=0, high=1, below=True),
    "recompute.every": _ONE,
    "recompute.num_checkpoints": _ONE,
    "data.seq_len": _ONE,
    "train.steps": _ONE,
    "train.micro_batch_size": _ONE,
    "train.accumulation_steps": _ONE,
    "train.global_batch_size": _ONE,
    "train.seed": _ZERO,
    "train.log_every": _ONE,
    "train.eval_every": _ZERO,
    "train.eval_batches": _ONE,
    "optimizer.lr": _ZERO,
    "optimizer.eps": _POSITIVE,
    "optimizer.weight_decay": _ZERO,
    "optimizer.momentum": Range(low=0, high=1, below=True),
    "optimizer.clip_grad_norm": _ZERO,
    "scheduler.warmup_steps": _ZERO,
    "scheduler.warmup_start": _FRACTION,
    "scheduler.final": _FRACTION,
    "scheduler.total_steps": _ONE,
    "scheduler.start": _FRACTION,
    "scheduler.rise_steps": _ONE,
    "scheduler.fall_steps": _ONE,
    "scheduler.rise_stairs": _ZERO,
    "scheduler.fall_stairs": _ZERO,
    "scheduler.decay_rate": _ZERO,
    "scheduler.decay_interval": _ZERO,
    "scheduler.step_size": _ONE,
    "scheduler.step_rate": _POSITIVE,
    "checkpoint.every": _ZERO,
    "checkpoint.keep": _ONE,
    "checkpoint.keep_every": _ZERO,
    "logger.every": _ONE,
    "launch.ranks": _ONE,
    "launch.threads": _ONE,
    "launch.min_ranks": _ONE,
    "launch.timeout_seconds": _POSITIVE,
}


def range_of(key: str) -> str:
    """The numbers that a key accepts, in words; empty if its type says all."""
    if key == "optimizer.betas":
        return "two of 0 or more and below 1"
    if key in ("offload.buffer_bytes", "offload.block_bytes"):
        return f"a multiple of {_PAGE_BYTES}"
    return str(_RANGES.get(key, ""))


def check(config: Config, *, given: frozenset[str], machine: Machine) -> None:
    """Raises ConfigError with all faults of `config`.

    given: the keys that the user set, apart from choosing options: what is in there and cannot act is a fault.
    """
    faults = list(_range_faults(config)) + effect_faults(config, given=given, machine=machine)
    faults += topology_faults(config, given=given, machine=machine)
    faults += [fault for rule in _RULES for fault in rule(config, machine)]
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))


def _range_faults(config: Config) -> Iterator[str]:
    for key, allowed in _RANGES.items():
        value = read(config, key=key)
        if value is not None and not allowed.holds(value):
            yield f"{key}={written(value)}: must be {allowed}"
    betas = config.optimizer.betas
    for number, beta in enumerate(betas or ()):
        if not 0 <= beta < 1:
            yield f"optimizer.betas={written(betas)}: number {number + 1} must be 0 or more and below 1"
    if betas is not None and len(betas) != 2:
        yield f"optimizer.betas={written(betas)}: must be two numbers, such as optimizer.betas=[0.9,0.95]"


def _zero_and_offload(config: Config, machine: Machine) -> Iterator[str]:
    zero, offload = config.zero, config.offload
    if zero.engine is not ZeroEngine.ztk:
        name = zero.engine.value
        if offload.optimizer is not OffloadTier.none or offload.parameters not in (
            ParameterTier.none,
            ParameterTier.auto,
        ):
            yield (
                f"offload: zero={name} has no offload; use zero=stage0 to stage3, or offload=none and leave out offload.optimizer and "
                "offload.parameters"
            )
        if config.optimizer.name is OptimizerName.lion:
            yield f"optimizer=lion: torch has none for zero={name}; use zero=stage0 to stage3, or optimizer=adamw"
        if config.checkpoint.every or config.checkpoint.resume is not None:
            yield (
                f"checkpoint: zero={name} is there to compare with and neither saves nor loads; use zero=stage0 to "
                "stage3, or leave out checkpoint.every and checkpoint.resume"
            )
        return
    if offload.parameters in (ParameterTier.cpu, ParameterTier.nvme) and zero.stage != 3:
        yield (
            f"offload.parameters={offload.parameters.value} needs sharded parameters and zero.stage is "
            f"{written(zero.stage)}: use zero=stage3, or offload.parameters=auto"
        )


def _nvme(config: Config, machine: Machine) -> Iterator[str]:
    if not offloads(config, OffloadTier.nvme):
        return
    for key in ("offload.buffer_bytes", "offload.block_bytes"):
        value = read(config, key=key)
        if value is not None and (value < 1 or value % _PAGE_BYTES):
            mended = max(1, -(-value // _PAGE_BYTES)) * _PAGE_BYTES
            yield f"{key}={value}: must be a multiple of {_PAGE_BYTES}, as direct I/O needs; use {key}={mended}"
    folder = Path(config.offload.nvme_path or config.output_dir).expanduser().absolute()
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        yield (
            f"offload.nvme_path={folder}: {existing} is not a folder that can be written to; "
            "use offload.nvme_path=FOLDER on a writable disk, or offload=cpu"
        )


def _precision(config: Config, machine: Machine) -> Iterator[str]:
    scale = config.precision.loss_scale
    dynamic = config.precision.dtype is DType.fp16 and scale.dynamic and scale.initial and scale.floor
    if dynamic and scale.initial < scale.floor:
        yield (
            f"precision.loss_scale.initial={scale.initial:g} lies below "
            f"precision.loss_scale.floor={scale.floor:g}: use precision.loss_scale.floor={scale.initial:g}"
        )


def _model(config: Config, machine: Machine) -> Iterator[str]:
    model, data = config.model, config.data
    if model.heads > 0 and model.dim > 0:
        if model.dim % model.heads:
            mended = max(1, model.dim // model.heads) * model.heads
            yield f"model.dim={model.dim} is not a multiple of model.heads={model.heads}: use model.dim={mended}"
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
    if data.name is not DataName.synthetic and 0 < model.vocab_size < 256:
        yield f"model.vocab_size={model.vocab_size}: text is read as bytes, use model.vocab_size=256, or data=synthetic"


def _data(config: Config, machine: Machine) -> Iterator[str]:
    if config.data.name is not DataName.files:
        return
    if config.data.path is None:
        yield "data=files reads what data.path names, and it names nothing: use data.path=FOLDER, a file or a glob, or data=stdlib"
        return
    for entry in data_paths(config):
        if not entry or not (os.path.exists(os.path.expanduser(entry)) or _matches(entry)):
            yield f"data.path={entry}: no such file or folder, and no file matches (from {os.getcwd()}): name others"


def data_paths(config: Config) -> list[str]:
    """`data.path` as a list."""
    path = config.data.path
    return [str(entry) for entry in path] if isinstance(path, list) else [str(path)]


def _matches(pattern: str) -> bool:
    return next(glob.iglob(os.path.expanduser(pattern), recursive=True), None) is not None


def _training(config: Config, machine: Machine) -> Iterator[str]:
    train, checkpoint = config.train, config.checkpoint
    if config.data.name is not DataName.synthetic and config.data.validation_fraction == 0 and train.eval_every:
        yield (
            f"train.eval_every={train.eval_every} has nothing to evaluate with data.validation_fraction=0: "
            "use train.eval_every=0, or data.validation_fraction=0.05"
        )
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
    if checkpoint.every > train.steps:
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
    optimizer, scheduler = config.optimizer, config.scheduler
    if optimizer.name is OptimizerName.sgd and optimizer.nesterov and not optimizer.momentum:
        yield (
            "optimizer.nesterov=true has no effect without momentum: use optimizer.momentum=0.9, or "
            "optimizer.nesterov=false"
        )
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
    if scheduler.name is SchedulerName.one_cycle and bool(scheduler.decay_rate) != bool(scheduler.decay_interval):
        yield (
            f"scheduler.decay_rate={scheduler.decay_rate:g} and scheduler.decay_interval={scheduler.decay_interval}: "
            "one has no effect without the other, set both or neither"
        )


def _launch(config: Config, machine: Machine) -> Iterator[str]:
    launch = config.launch
    device = device_of(config, machine)
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


_RULES = (_zero_and_offload, _nvme, _precision, _model, _data, _training, _optimizer, _launch)
