"""Converts the checked configuration to the library's policies."""

import copy
import json
import os
from dataclasses import fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ztk import checkpoint
from ztk.config import Config, is_own
from ztk.config.keys import read, write
from ztk.core.policies.ema import EmaPolicy
from ztk.core.policies.hardware import Hardware
from ztk.core.policies.key import policy_of
from ztk.core.policies.model import LoraPolicy
from ztk.core.policies.offload import OffloadConfig
from ztk.core.policies.peers import Peer
from ztk.core.policies.precision import DType, PrecisionConfig
from ztk.core.policies.profile import ProfilePolicy
from ztk.core.policies.rollout import StrategyConfig
from ztk.core.policies.runs import is_hugging_face
from ztk.core.policies.tier import Tier
from ztk.core.policies.zero import ZeroConfig, ZeroPolicy
from ztk.core.precision import LossScalePolicy, PrecisionPolicy
from ztk.core.runtime import Topology
from ztk.experiments.user_objects import has_torch_scheduler, own_learning_rates, own_optimizer, planned_optimizer
from ztk.kernels import Ceilings
from ztk.nn import DecoderConfig
from ztk.optim import OptimizerPolicy, SchedulePolicy, lr_table
from ztk.parallel.pipeline import PipelinePolicy
from ztk.parallel.recompute import RecomputePolicy
from ztk.parallel.tensor import TensorPolicy
from ztk.report import KernelPolicy, ReportPolicy, TrackerPolicy
from ztk.zero.offload import OffloadPolicy

WANDB_NAME_LETTERS = 120


def decoder_config(config: Config) -> DecoderConfig:
    return DecoderConfig(**_given(config.model, without=("name", "path", "init", "kernels")))


def trained_only(config: Config) -> bool:
    """Returns whether checkpoints contain only trained parameters. The base below adapters stays at `model.path`.

    It is saved too if it is not there: ztk's decoder, and weights trained by `warm_start.path`.
    """
    if config.lora.rank == 0 or not is_hugging_face(config.model):
        return False
    return config.warm_start.path is None or checkpoint.leaves_out_base(config.warm_start.path)


def lora_policy(config: Config) -> LoraPolicy | None:
    """Returns None if the model itself trains."""
    if config.lora.rank == 0:
        return None
    return policy_of(LoraPolicy, given=config.lora)


def optimizer_policy(config: Config) -> OptimizerPolicy:
    return replace(policy_of(OptimizerPolicy, given=config.optimizer), rounding_seed=config.train.seed)


def optimizer_of(config: Config, *, model: nn.Module) -> dict[str, Any]:
    """Returns the arguments of `parallelize` for the update of `model`."""
    if is_own(config, section="optimizer"):
        return own_optimizer(config, model=model)
    return {"optimizer": optimizer_policy(config)}


def planned_policy(config: Config) -> OptimizerPolicy:
    """Returns the optimizer for a plan."""
    return planned_optimizer(config) if is_own(config, section="optimizer") else optimizer_policy(config)


def learning_rates(config: Config, *, lr: float | None = None) -> Tensor | None:
    """Returns the `lr_table` of `parallelize`: the multipliers of `lr`, by default optimizer.lr. None if the groups of an own optimizer
    follow a torch scheduler."""
    if is_own(config, section="scheduler"):
        if is_own(config, section="optimizer") and has_torch_scheduler(config):
            return None
        policy = optimizer_policy(config)
        return own_learning_rates(config, policy=policy if lr is None else replace(policy, lr=lr))
    return lr_table(policy_of(SchedulePolicy, given=config.scheduler), steps=config.train.steps)


def ema_policy(config: Config) -> EmaPolicy | None:
    """Returns None if there is no average of the weights."""
    return policy_of(EmaPolicy, given=config.ema) if config.ema.decay else None


def precision_policy(config: Config) -> PrecisionPolicy:
    values = _given(config.precision, without=("loss_scale",))
    is_scaled = config.precision.dtype is DType.fp16
    loss_scale = policy_of(LossScalePolicy, given=config.precision.loss_scale) if is_scaled else None
    return PrecisionPolicy.named(
        values["dtype"],
        reduce_dtype=values.get("reduce_dtype"),
        loss_scale=loss_scale,
        master=values.get("master"),
        float8=values.get("float8"),
    )


def zero_policy(config: Config) -> ZeroPolicy:
    return policy_of(ZeroPolicy, given=config.zero)


def offload_policy(config: Config) -> OffloadPolicy:
    return policy_of(OffloadPolicy, given=config.offload)


def of_model(config: Config, *, given: StrategyConfig) -> Config:
    """Returns the configuration for a model other than the policy. Values missing in `given` are the policy's."""
    own = copy.deepcopy(config)
    stage, tier = own.zero.stage, own.offload.optimizer
    if given.zero is not None and (chosen := int(given.zero.value.removeprefix("stage"))) != stage:
        own.zero = ZeroConfig(engine=own.zero.engine, stage=chosen, bucket_size=own.zero.bucket_size)
    if given.offload is not None and given.offload is not tier:
        places = {name: read(config, key=f"offload.{name}") for name in ("nvme_path", "pin_memory")}
        own.offload = OffloadConfig(optimizer=given.offload, parameters=Tier.none, **places)
    if (own.zero.stage, own.offload.optimizer) != (stage, tier):
        follows = own.zero.stage == 3
        write(own, key="offload.parameters", value=own.offload.optimizer if follows else Tier.none)
    if given.precision is not None and given.precision is not own.precision.dtype:
        own.precision = PrecisionConfig(dtype=given.precision)
    return own


def topology(config: Config) -> Topology:
    degrees = {name: getattr(config.topology, name) for name in ("pipeline", "tensor", "sequence", "context", "expert")}
    return Topology(**degrees, intra_node=config.zero.hpz_partition_size or 1)


def pipeline_policy(config: Config) -> PipelinePolicy:
    return policy_of(PipelinePolicy, given=config.topology)


def tensor_policy(config: Config) -> TensorPolicy:
    return policy_of(TensorPolicy, given=config.topology)


def recompute_policy(config: Config) -> RecomputePolicy:
    return policy_of(RecomputePolicy, given=config.recompute)


def report_policy(config: Config, *, total_steps: int | None = None) -> ReportPolicy:
    """Returns the report policy. wandb's group is the folder that a sweep's jobs share, and its name is the run's command line.

    total_steps: number of the last step, `train.steps` by default.
    """
    logger, folder = config.logger, Path(config.output_dir)
    described = {
        "group": folder.parent.name,
        "name": run_name(folder),
        "job_type": config.task.name,
        "config": _plain(config),
    }
    tracker = policy_of(TrackerPolicy, given=logger, others=described)
    return ReportPolicy(
        folder=os.fspath(folder),
        total_steps=config.train.steps if total_steps is None else total_steps,
        every=config.train.log_every,
        tracker=tracker,
        tracker_every=logger.every or config.train.log_every,
        slowest_every=config.launch.slowest_every or 0,
        draws=not config.train.quick,
        kernels=KernelPolicy(every=config.kernels.log_every or 0, ceilings=ceilings(config)),
        profile=None if config.train.profile is None else ProfilePolicy.of(config.train.profile),
    )


def ceilings(config: Config) -> Ceilings | None:
    """Returns the peak rates of the run's device, or None if the hardware is not configured."""
    given = config.hardware
    if given.memory_bandwidth is None:
        return None
    rates = {torch.bfloat16: given.bf16_rate, torch.float16: given.fp16_rate, torch.float32: given.fp32_rate}
    return Ceilings(
        memory_bandwidth=given.memory_bandwidth, rates={dtype: rate for dtype, rate in rates.items() if rate}
    )


def run_name(folder: Path) -> str:
    """Returns the overrides of the command line without group prefixes, or the folder's name if there are none."""
    try:
        overrides = json.loads((folder / "overrides.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return folder.name
    words = [f"{key.rpartition('.')[2]}={value}" for key, value in overrides.items()]
    return " ".join(words)[:WANDB_NAME_LETTERS] or folder.name


def hardware(config: Config) -> Hardware | None:
    """Returns the hardware of a plan. None without a choice, and for a run, which records only the rates for its floors and MFU."""
    is_planned = config.task.name == "plan" and config.hardware.name is not None
    return Hardware(**_given(config.hardware, without=("file",))) if is_planned else None


def peer(config: Config) -> Peer:
    """The way in which another library would run the step; ztk's own where the command line names none."""
    given = {field.name: getattr(config.plan, field.name) for field in fields(Peer)}
    return Peer(**{name: value for name, value in given.items() if value is not None})


def _given(section: Any, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the fields with an effect in this run; others are None in a checked configuration."""
    values = {field.name: getattr(section, field.name) for field in fields(section) if field.name not in without}
    return {name: _plain(value) for name, value in values.items() if value is not None}


def _plain(value: Any) -> Any:
    """Converts dataclasses to dictionaries, and enumeration members to their values."""
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return value
