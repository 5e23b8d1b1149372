"""DeepSpeed's engine answers many questions by methods; a script that calls them must find methods."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ztk.core.runtime import Tier
from ztk.deepspeed.collectives.groups import data_parallel_group_of, sequence_group_of
from ztk.deepspeed.config.parsed import DeepSpeedConfig
from ztk.deepspeed.watch.flops import FlopsProfiler
from ztk.deepspeed.watch.monitors import MonitorMaster
from ztk.train.engine import Engine

if TYPE_CHECKING:
    from ztk.deepspeed.config import Settings
    from ztk.deepspeed.optimizers.sharded import ShardedOptimizer
    from ztk.deepspeed.watch.clock import Throughput
    from ztk.deepspeed.watch.watcher import Watcher


class Getters:
    """Mixed into the engine."""

    # What the engine has.
    settings: "Settings"
    engine: Engine
    optimizer: "ShardedOptimizer | None"
    _watcher: "Watcher"

    def train_batch_size(self) -> int:
        """Samples of a step, over all ranks."""
        return self.settings.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a rank's micro-batch."""
        return self.settings.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self.settings.batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """train_batch_size, micro-batch size, accumulation steps."""
        batch = self.settings.batch
        return batch.train, batch.micro, batch.accumulation

    def gradient_clipping(self) -> float:
        """The largest norm of a gradient; 0: not clipped."""
        return self.settings.gradient_clipping

    def zero_optimization(self) -> bool:
        """Whether anything is sharded: stage 1 or more."""
        return self.settings.zero.stage > 0

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self.settings.zero.stage

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded: stage 3."""
        return self.settings.zero.shards_parameters

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded: stages 2 and 3."""
        return self.settings.zero.shards_gradients

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether `save_16bit_model` may gather sharded parameters."""
        return self.settings.gathers_on_save

    def zero_cpu_offload(self) -> bool:
        """The optimizer's states are stored in main memory."""
        return self.settings.offload.optimizer is Tier.cpu

    def zero_reduce_bucket_size(self) -> int:
        """Elements of a bucket."""
        return self.settings.zero.bucket_size

    def zero_prefetch_bucket_size(self) -> int:
        """Elements that are gathered ahead of their use."""
        return self.settings.zero.prefetch_bucket_size

    def zero_max_live_parameters(self) -> int:
        """Gathered elements above which nothing is gathered ahead."""
        return self.settings.zero.max_live_parameters

    def zero_max_reuse_distance(self) -> int:
        """A unit stays gathered if it is used again within this many elements."""
        return self.settings.zero.max_reuse_distance

    def zero_param_persistence_threshold(self) -> int:
        """Elements below which a parameter stays gathered."""
        return self.settings.zero.param_persistence_threshold

    def fp16_auto_cast(self) -> bool:
        """Whether floating inputs are cast to the model's dtype."""
        return self.settings.casts_inputs

    def fp16_enabled(self) -> bool:
        """Whether the model computes in float16."""
        return self.settings.precision.dtype is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bfloat16."""
        return self.settings.precision.dtype is torch.bfloat16

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes; see `loss_scale`."""
        return self.settings.static_loss_scale == 0

    def loss_scale(self) -> float:
        """As in the configuration, 0 for dynamic; `optimizer.cur_scale` is the one in use."""
        return self.settings.static_loss_scale

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Of the model, and in which gradients add up."""
        return self.settings.precision.dtype, self.engine.zero.gradient_dtype

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype in which gradients are sent and add up."""
        return self.engine.zero.gradient_dtype

    def optimizer_name(self) -> str | None:
        """As in the configuration, or the class of the script's optimizer."""
        if self.optimizer is None:
            return None
        if self.optimizer.optimizer is not self.optimizer:
            return type(self.optimizer.optimizer).__name__
        return (self.settings.given.get("optimizer") or {"type": "AdamW"})["type"].lower()

    def scheduler_name(self) -> str | None:
        """The schedule of the configuration; None: it has none."""
        return None if self.settings.schedule is None else self.settings.schedule.type

    def get_lr(self) -> list[float]:
        """The learning rate of every group, for the next step."""
        return self._of_groups("lr")

    def get_type(self) -> list:
        """What every group says of its `type`; 0.0 for one that says nothing."""
        return self._of_groups("type")

    def get_mom(self) -> list:
        """Of SGD the momenta, of others the betas."""
        return self._of_groups("momentum" if self.optimizer_name() in ("sgd", "SGD") else "betas")

    def _of_groups(self, key: str) -> list:
        return [] if self.optimizer is None else [group.get(key, 0.0) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Of the last step's averaged gradient before clipping; None before the first. On a GPU this waits for the device."""
        return self.engine.read_metrics().grad_norm if self.engine.global_steps else None

    def get_data_parallel_rank(self) -> int:
        """This rank's place among those that compute on different data."""
        mesh = self.engine.process.mesh
        return mesh.comm("data").rank // mesh.topology.sequence

    def get_sequence_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that share this rank's sequences; None where sequences are not divided."""
        mesh = self.engine.process.mesh
        return sequence_group_of(mesh.topology) if mesh.topology.sequence > 1 else None

    def get_model_parallel_rank(self) -> int:
        """This rank's place among those that share the layers."""
        return self.engine.process.mesh.comm("tp").rank

    get_tensor_parallel_rank = get_model_parallel_rank

    def steps_per_print(self) -> int | None:
        """Steps between lines of progress; None: there are no lines."""
        return self.settings.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether the times of forward, backward and step are printed."""
        return self.settings.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        """Whether memory is printed with the times."""
        return self.settings.memory_breakdown

    def dump_state(self) -> bool:
        """Whether the configuration is printed at the start."""
        return self.settings.dump_state

    def flops_profiler_enabled(self) -> bool:
        """Whether the configuration asks for a FLOPs profile."""
        return self.settings.watching.flops is not None

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of fwd, bwd and step, of the last step; with `_microstep` of the last micro-batch. Empty unless measured."""
        clock = self._watcher.clock
        if clock is None:
            return {}
        return {**clock.step, **{f"{name}_microstep": spent for name, spent in clock.micro.items()}}

    @property
    def monitor(self) -> MonitorMaster:
        """The monitors of the configuration; scripts write events of their own to them."""
        return self._watcher.monitor

    @property
    def flops_profiler(self) -> FlopsProfiler | None:
        """The profiler of the configuration; None: it asks for none."""
        return self._watcher.flops

    @property
    def tput_timer(self) -> "Throughput":
        """Samples per second: `avg_samples_per_sec()`, `update_epoch_count()`; counted from the first read on, or where they are printed."""
        return self._watcher.throughput

    def dataloader_drop_last(self) -> bool:
        """Whether a loader leaves out a last batch that is not full."""
        return self.settings.drop_last

    @property
    def config(self) -> dict:
        """The configuration as it was given."""
        return self.settings.given

    @property
    def _config(self) -> DeepSpeedConfig:
        """The same under DeepSpeed's attribute names, with the batch sizes solved; libraries read it."""
        return DeepSpeedConfig.of(self.settings, world_size=self.world_size)

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that compute on different data with the same part of the model. The ranks of a group ask for it together at first."""
        return data_parallel_group_of(self.engine.process.mesh.topology)

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The script's own optimizer, else the sharded one."""
        return None if self.optimizer is None else self.optimizer.optimizer

    @property
    def device(self) -> torch.device:
        return self.engine.process.device

    @property
    def local_rank(self) -> int:
        """This rank's place on its machine."""
        return self.engine.process.local_rank

    @property
    def global_rank(self) -> int:
        """This rank's place among all."""
        return self.engine.process.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.engine.process.world_size

    @property
    def dp_world_size(self) -> int:
        """Ranks with different data; those that share a sequence count as one."""
        mesh = self.engine.process.mesh
        return mesh.comm("data").size // mesh.topology.sequence

    @property
    def seq_dp_world_size(self) -> int:
        """Ranks over which gradients are averaged."""
        return self.engine.process.mesh.comm("data").size

    @property
    def mp_world_size(self) -> int:
        """The number of ranks that share the layers."""
        return self.engine.process.mesh.comm("tp").size
