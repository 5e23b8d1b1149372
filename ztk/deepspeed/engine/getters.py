"""DeepSpeed's getter methods for the configuration and the state of an engine."""

from operator import attrgetter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ztk.core.runtime import Tier
from ztk.deepspeed.collectives.groups import group_along
from ztk.deepspeed.config.settings import DeepSpeedConfig
from ztk.deepspeed.tools.answers import method
from ztk.train.engine import Engine

if TYPE_CHECKING:
    from ztk.deepspeed.config import Settings
    from ztk.deepspeed.optimizers.sharded import ShardedOptimizer
    from ztk.deepspeed.watch.watcher import Watcher


class Getters:
    """Mixed into the engine."""

    # Attributes of the engine.
    settings: "Settings"
    engine: Engine
    optimizer: "ShardedOptimizer | None"
    _watcher: "Watcher"

    train_batch_size = method("settings.batch.train", "Samples of a step, over all ranks.")
    train_micro_batch_size_per_gpu = method("settings.batch.micro", "Samples of a rank's micro-batch.")
    gradient_accumulation_steps = method("settings.batch.accumulation", "Micro-batches of a step.")
    gradient_clipping = method("settings.gradient_clipping", "Gradients are clipped to this norm; 0 disables clipping.")
    zero_optimization_stage = method("settings.zero.stage", "The ZeRO stage.")
    zero_optimization_partition_weights = method("settings.zero.shards_parameters", "Whether parameters are sharded.")
    zero_optimization_partition_gradients = method("settings.zero.shards_gradients", "Whether gradients are sharded.")
    zero_gather_16bit_weights_on_model_save = method(
        "settings.gathers_on_save", "Whether `save_16bit_model` may gather sharded parameters."
    )
    zero_reduce_bucket_size = method("settings.zero.bucket_size", "Elements of a bucket.")
    zero_prefetch_bucket_size = method(
        "settings.zero.prefetch_bucket_size", "Elements that are gathered ahead of their use."
    )
    zero_max_live_parameters = method(
        "settings.zero.max_live_parameters", "Gathered elements above which nothing is gathered ahead."
    )
    zero_max_reuse_distance = method(
        "settings.zero.max_reuse_distance", "A unit stays gathered if it is used again within this many elements."
    )
    zero_param_persistence_threshold = method(
        "settings.zero.param_persistence_threshold", "Elements below which a parameter stays gathered."
    )
    fp16_auto_cast = method("settings.casts_inputs", "Whether floating inputs are cast to the model's dtype.")
    loss_scale = method(
        "settings.static_loss_scale",
        "The configured loss scale, 0 for dynamic; `optimizer.cur_scale` is the current one.",
    )
    steps_per_print = method("settings.steps_per_print", "Steps between lines of progress, or None without such lines.")
    wall_clock_breakdown = method("settings.wall_clock_breakdown", "Whether forward, backward and step are timed.")
    memory_breakdown = method("settings.memory_breakdown", "Whether memory is printed with the times.")
    dump_state = method("settings.dump_state", "Whether the configuration is printed at the start.")
    get_data_parallel_rank = method("engine.process.mesh.replica", "This rank's index among those with different data.")
    dataloader_drop_last = method(
        "settings.dataloader_drop_last", "Whether a loader leaves out a last batch that is not full."
    )

    device = property(attrgetter("engine.process.device"))
    local_rank = property(attrgetter("engine.process.local_rank"), doc="This rank's place on its machine.")
    global_rank = property(attrgetter("engine.process.rank"), doc="This rank's place among all.")
    world_size = property(attrgetter("engine.process.world_size"), doc="The number of ranks.")
    dp_world_size = property(
        attrgetter("engine.process.mesh.replicas"),
        doc="Ranks with different data; those that share a sequence count as one.",
    )
    mp_world_size = property(attrgetter("engine.process.mesh.topology.tensor"), doc="Ranks that share the layers.")
    config = property(attrgetter("settings.given"), doc="The configuration as it was given.")
    communication_data_type = property(
        attrgetter("engine.zero.gradient_dtype"), doc="The dtype in which gradients are reduced and accumulated."
    )
    monitor = property(
        attrgetter("_watcher.monitor"), doc="The monitors of the configuration. Scripts may also write events to them."
    )
    tput_timer = property(
        attrgetter("_watcher.throughput"), doc="Samples per second, counted from the first read or if printed."
    )

    def get_batch_info(self) -> tuple[int, int, int]:
        """Returns train_batch_size, micro-batch size, accumulation steps."""
        batch = self.settings.batch
        return batch.train, batch.micro, batch.accumulation

    def zero_optimization(self) -> bool:
        """Returns whether anything is sharded: stage 1 or more."""
        return self.settings.zero.stage > 0

    def zero_cpu_offload(self) -> bool:
        """Returns whether the optimizer's states are stored in main memory."""
        return self.settings.offload.optimizer is Tier.cpu

    def zero_partial_offload(self) -> float:
        """Returns the part of the optimizer's states that is offloaded."""
        return self.settings.offload.optimizer_fraction

    def fp16_enabled(self) -> bool:
        """Returns whether the model computes in float16."""
        return self.settings.precision.dtype is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Returns whether the model computes in bfloat16."""
        return self.settings.precision.dtype is torch.bfloat16

    def dynamic_loss_scale(self) -> bool:
        """Returns whether the loss scale is dynamic; see `loss_scale`."""
        return self.settings.static_loss_scale == 0

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Returns the dtypes of the model and of gradient accumulation."""
        return self.settings.precision.dtype, self.engine.zero.gradient_dtype

    def optimizer_name(self) -> str | None:
        """Returns the name in the configuration, or the class of the script's optimizer."""
        if self.optimizer is None:
            return None
        if self.optimizer.optimizer is not self.optimizer:
            return type(self.optimizer.optimizer).__name__
        return (self.settings.given.get("optimizer") or {"type": "AdamW"})["type"].lower()

    def scheduler_name(self) -> str | None:
        """Returns the schedule of the configuration, or None."""
        return None if self.settings.schedule is None else self.settings.schedule.type

    def get_lr(self) -> list[float]:
        """Returns the learning rate of every group, for the next step."""
        return self._of_groups("lr")

    def get_type(self) -> list:
        """Returns the `type` of every group; 0.0 if it has none."""
        return self._of_groups("type")

    def get_mom(self) -> list:
        """Returns the momenta of SGD, or the betas of other optimizers."""
        return self._of_groups("momentum" if self.optimizer_name() in ("sgd", "SGD") else "betas")

    def _of_groups(self, key: str) -> list:
        return [] if self.optimizer is None else [group.get(key, 0.0) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Returns the norm of the last step's averaged gradient before clipping; None before the first.

        On a GPU this waits for the device.
        """
        return self.engine.read_metrics().grad_norm if self.engine.global_steps else None

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Returns milliseconds of fwd, bwd and step of the last step, or with `_microstep` of the last micro-batch.

        Empty unless measured.
        """
        clock = self._watcher.clock
        if clock is None:
            return {}
        return {**clock.step, **{f"{name}_microstep": spent for name, spent in clock.micro.items()}}

    def get_sequence_parallel_group(self) -> dist.ProcessGroup | None:
        """Returns the ranks that share this rank's sequences, or None without sequence parallelism."""
        topology = self.engine.process.mesh.topology
        return group_along("sp", topology=topology) if topology.sequence > 1 else None

    def get_model_parallel_rank(self) -> int:
        """Returns this rank's index among the ranks that share the layers."""
        return self.engine.process.mesh.comm("tp").rank

    get_tensor_parallel_rank = get_model_parallel_rank

    @property
    def _config(self) -> DeepSpeedConfig:
        """The configuration under DeepSpeed's attribute names, with all batch sizes; libraries read it."""
        return DeepSpeedConfig.of(self.settings, world_size=self.world_size)

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks with different data and the same part of the model. Its first use is a collective call of the group."""
        return group_along("dp", topology=self.engine.process.mesh.topology)

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The script's own optimizer, else the sharded one."""
        return None if self.optimizer is None else self.optimizer.optimizer

    @property
    def seq_dp_world_size(self) -> int:
        """The number of ranks over which gradients are averaged."""
        return self.engine.process.mesh.comm("data").size
