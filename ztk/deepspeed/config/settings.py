"""A full configuration: read, checked, converted to policies, and shown under DeepSpeed's attribute names."""

import os
from dataclasses import dataclass, field, fields, replace
from typing import Self

import torch
import torch.distributed as dist

from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import PrecisionPolicy
from ztk.deepspeed.config.keys import Findings, read_section
from ztk.deepspeed.config.modules import (
    ActivationCheckpointing,
    Hybrid,
    read_activation_checkpointing,
    read_hybrid,
    read_pipeline,
)
from ztk.deepspeed.config.optimizer import ScheduleChoice, read_optimizer, read_scheduler
from ztk.deepspeed.config.parallel import (
    ExpertParallel,
    TensorSettings,
    read_experts,
    read_tensor_parallel,
)
from ztk.deepspeed.config.precision import Precision
from ztk.deepspeed.config.source import read_source
from ztk.deepspeed.config.top import (
    ELSEWHERE,
    KEYS,
    Averaging,
    BatchSizes,
    TopLevel,
    check_absent,
    read_averaging,
    read_checkpoint,
    solve_batch,
)
from ztk.deepspeed.config.watching import MonitorPolicy, Watching, read_watching
from ztk.deepspeed.config.zero import LeafModules, Zero
from ztk.deepspeed.tools.log import logger
from ztk.optim import OptimizerPolicy
from ztk.zero.offload import OffloadPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings(TopLevel):
    """A configuration in the form that the engine uses.

    optimizer, schedule, activation_checkpointing, hybrid: None without such a section.
    autocast: the dtype of torch.autocast around the forward.
    buffer_dtype: dtype of floating-point buffers. None keeps the model's dtypes.
    static_loss_scale: 0 for dynamic.
    notes: accepted keys without effect in ztk, with the reason.
    """

    given: dict = field(repr=False)
    batch: BatchSizes
    averaging: Averaging
    autocast: torch.dtype | None
    precision: PrecisionPolicy
    buffer_dtype: torch.dtype | None
    static_loss_scale: float
    casts_inputs: bool
    zero: ZeroPolicy
    leaves: LeafModules
    gathers_on_save: bool
    offload: OffloadPolicy
    tensor: TensorSettings
    optimizer: OptimizerPolicy | None
    schedule: ScheduleChoice | None
    activation_checkpointing: ActivationCheckpointing | None
    pipeline_recompute_interval: int
    experts: ExpertParallel
    hybrid: Hybrid | None
    gradient_clipping: float
    watching: Watching
    tag_validation: str
    notes: tuple[str, ...]


def parse_config(config: object, *, world_size: int) -> Settings:
    """Parses a configuration. config: a dict, a path or base64; see `read_source`. Raises DeepSpeedConfigError with every fault."""
    findings = Findings()
    given = read_source(config, findings=findings)
    top = read_section(given, path="", keys=KEYS, findings=findings, elsewhere=ELSEWHERE)
    tensor = read_tensor_parallel(given.get("tensor_parallel"), world_size=world_size, findings=findings)
    replicas, clip = world_size // tensor.degree, top.get("gradient_clipping", 1.0)
    batch, averaging = solve_batch(top, world_size=replicas, findings=findings), read_averaging(top, findings=findings)
    zero = Zero(given, findings=findings)
    precision = Precision(given, top=top, stage=zero.stage, findings=findings)
    made = Settings(
        **{key.name: top[key.name] for key in fields(TopLevel) if key.name in top},
        given=given,
        batch=batch,
        averaging=averaging,
        autocast=precision.autocast,
        precision=precision.policy,
        buffer_dtype=precision.buffer_dtype,
        static_loss_scale=precision.static_loss_scale,
        casts_inputs=precision.casts_inputs,
        zero=zero.policy,
        leaves=zero.leaves,
        gathers_on_save=zero.gathers_on_save,
        offload=zero.offload,
        tensor=tensor,
        optimizer=read_optimizer(given.get("optimizer"), clip=clip, findings=findings),
        schedule=read_scheduler(given.get("scheduler"), findings=findings),
        activation_checkpointing=read_activation_checkpointing(
            given.get("activation_checkpointing"), findings=findings
        ),
        pipeline_recompute_interval=read_pipeline(given.get("pipeline"), findings=findings),
        experts=read_experts(given, top=top, ranks=replicas, findings=findings),
        hybrid=read_hybrid(
            given.get("hybrid_engine"),
            stage=zero.stage,
            world_size=world_size,
            tensor_degree=tensor.degree,
            findings=findings,
        ),
        gradient_clipping=clip,
        watching=read_watching(given, findings=findings),
        tag_validation=read_checkpoint(given.get("checkpoint", {}), findings=findings),
        notes=(),
    )
    check_absent(given, findings=findings)
    findings.check()
    return replace(made, notes=tuple(findings.notes))


class DeepSpeedConfig:
    """The checked configuration with all batch sizes, under DeepSpeed's attribute names. `settings` has the engine's form.

    config: dict, path or base64. Raises DeepSpeedConfigError with every fault, and ValueError for mpu and mesh_device.
    """

    def __init__(self, config: object, mpu: None = None, mesh_device: None = None) -> None:
        for name, value in (("mpu", mpu), ("mesh_device", mesh_device)):
            if value is not None:
                raise ValueError(f"{name}: not offered; all ranks are data-parallel here, leave it out")
        self.world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
        self._show(parse_config(config, world_size=self.world_size))

    @classmethod
    def of(cls, settings: Settings, *, world_size: int) -> Self:
        """Returns an engine's current configuration."""
        made = cls.__new__(cls)
        made.world_size = world_size
        made._show(settings)
        return made

    def _show(self, settings: Settings) -> None:
        self.settings = settings
        self._param_dict = settings.given
        self.train_batch_size = settings.batch.train
        self.train_micro_batch_size_per_gpu = settings.batch.micro
        self.gradient_accumulation_steps = settings.batch.accumulation
        self.gradient_clipping = settings.gradient_clipping
        self.zero_optimization_stage = settings.zero.stage
        self.zero_enabled = settings.zero.stage > 0
        optimizer, scheduler = (settings.given.get(name) or {} for name in ("optimizer", "scheduler"))
        self.optimizer_name = optimizer["type"].lower() if optimizer else None
        self.optimizer_params = optimizer.get("params")
        self.scheduler_name, self.scheduler_params = scheduler.get("type"), scheduler.get("params")
        self.steps_per_print = settings.steps_per_print
        self.wall_clock_breakdown = settings.wall_clock_breakdown
        self.memory_breakdown = settings.memory_breakdown
        self.dump_state = settings.dump_state
        self.monitor_config: MonitorPolicy = settings.watching.monitors

    def get(self, key: str, default: object = None) -> object:
        """Returns a section as given."""
        return self._param_dict.get(key, default)

    def print(self, name: str) -> None:
        """Logs every attribute."""
        logger.info("%s:", name)
        for key, value in sorted(vars(self).items()):
            if key not in ("settings", "_param_dict"):
                logger.info("  %s %s %s", key, "." * (29 - len(key)), value)
