"""`DeepSpeedConfig`: a configuration that a script reads before, or without, `initialize`."""

import os
from typing import Self

import torch.distributed as dist

from ztk.deepspeed.config import Settings, parse_config
from ztk.deepspeed.tools.log import logger
from ztk.deepspeed.watch.monitors import MonitorPolicy


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
