"""The typed form of one run: every key that a command line may set, its type and what it means.

Values stand in `conf/`, each with its meaning; this file holds names and types. None means "plays no part in this run"
unless a comment says otherwise: after `ztk.config.to_config` a key that has no effect is None, and what was left to the
machine is a number. Buckets are counted in elements, memory in bytes, time in seconds, phases of the learning rate in
optimizer steps.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class ZeroEngine(StrEnum):
    """Who shards and reduces."""

    ztk = "ztk"  # ztk's own ZeRO, stages 0 to 3
    ddp = "ddp"  # torch.nn.parallel.DistributedDataParallel, to compare with
    fsdp2 = "fsdp2"  # torch.distributed.fsdp.fully_shard, to compare with


class OffloadTier(StrEnum):
    """Where a rank's shard sleeps between its uses."""

    none = "none"  # on the device
    cpu = "cpu"  # in main memory, pinned beside a GPU
    nvme = "nvme"  # in a file, through a fixed pool of buffers


class ParameterTier(StrEnum):
    """As `OffloadTier`; `auto` follows `offload.optimizer` at stage 3 and stays on the device below."""

    auto = "auto"
    none = "none"
    cpu = "cpu"
    nvme = "nvme"


# In which order a pipeline's ranks treat micro-batches. Written so because 1f1b is no name that a class body can have.
# gpipe: all forwards, then all backwards. 1f1b: a forward and a backward in turn, so that fewer micro-batches are alive. interleaved: 1f1b
# over several stages per rank, a smaller bubble for more transfers. zero_bubble: 1f1b whose gradients of weights fill the bubble.
PipelineSchedule = StrEnum(
    "PipelineSchedule", [(name, name) for name in ("gpipe", "1f1b", "interleaved", "zero_bubble")]
)


class RecomputeMode(StrEnum):
    """What the backward finds of a block."""

    none = "none"  # all that the forward saved
    full = "full"  # its input
    selective = "selective"  # its input and the results of matrix products and attention


class DType(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class DataName(StrEnum):
    stdlib = "stdlib"  # the source code of the Python standard library on this machine
    files = "files"  # whatever `data.path` names
    synthetic = "synthetic"  # random tokens, for benchmarks


class OptimizerName(StrEnum):
    adamw = "adamw"
    adam = "adam"
    sgd = "sgd"
    lion = "lion"


class SchedulerName(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    one_cycle = "one_cycle"
    range_test = "range_test"


class WarmupShape(StrEnum):
    linear = "linear"
    log = "log"


class KernelBackend(StrEnum):
    auto = "auto"  # Triton on a GPU, torch's vectorised kernels on a CPU
    triton = "triton"  # Triton, or refuse
    reference = "reference"  # the plain torch reference everywhere


class LoggerMode(StrEnum):
    offline = "offline"
    online = "online"
    disabled = "disabled"


class DeviceName(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass(kw_only=True)
class TaskConfig:
    name: str
    module: str  # imported by every rank; its `main(config)` is the program


@dataclass(kw_only=True)
class ZeroConfig:
    engine: ZeroEngine
    stage: int | None = None
    bucket_size: int | None = None
    prefetch_bucket_size: int | None = None
    max_live_parameters: int | None = None
    max_reuse_distance: int | None = None
    param_persistence_threshold: int | None = None
    quantized_weights: bool | None = None
    quantized_gradients: bool | None = None
    hpz_partition_size: int | None = None


@dataclass(kw_only=True)
class OffloadConfig:
    optimizer: OffloadTier
    parameters: ParameterTier
    nvme_path: str | None = None
    buffer_count: int | None = None
    buffer_bytes: int | None = None
    block_bytes: int | None = None
    threads: int | None = None
    pin_memory: bool | None = None
    direct_io: bool | None = None


@dataclass(kw_only=True)
class LossScaleConfig:
    dynamic: bool | None = None
    initial: float | None = None
    window: int | None = None
    hysteresis: int | None = None
    floor: float | None = None


@dataclass(kw_only=True)
class PrecisionConfig:
    dtype: DType
    reduce_dtype: DType | None = None  # None: as dtype
    loss_scale: LossScaleConfig


@dataclass(kw_only=True)
class RecomputeConfig:
    mode: RecomputeMode
    every: int | None = None
    inputs_on_cpu: bool | None = None
    partition_inputs: bool | None = None
    contiguous: bool | None = None
    num_checkpoints: int | None = None  # None: one per recomputed block


@dataclass(kw_only=True)
class TopologyConfig:
    pipeline: int
    tensor: int
    expert: int
    sequence: int
    data: int | None  # batches at a time; None: as many as the ranks leave
    sequence_parallel: bool | None
    schedule: PipelineSchedule | None
    virtual_stages: int | None
    partition: str | None
    max_local_gradients: int | None


@dataclass(kw_only=True)
class ModelConfig:
    name: str
    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden_dim: int
    max_seq_len: int
    rope_theta: float
    norm_eps: float
    tie_embeddings: bool
    experts: int | None = None  # None: the model is dense
    experts_per_token: int | None = None
    experts_every: int | None = None
    expert_hidden_dim: int | None = None
    shared_hidden_dim: int | None = None
    balance_loss_weight: float | None = None
    router_z_loss_weight: float | None = None


@dataclass(kw_only=True)
class DataConfig:
    name: DataName
    path: Any = None  # a file, folder or glob, or a list of them
    validation_fraction: float | None = None
    seq_len: int


@dataclass(kw_only=True)
class TrainConfig:
    steps: int
    micro_batch_size: int
    accumulation_steps: int | None = None
    global_batch_size: int | None = None
    seed: int
    log_every: int
    eval_every: int | None = None
    eval_batches: int | None = None


@dataclass(kw_only=True)
class OptimizerConfig:
    name: OptimizerName
    lr: float
    betas: list[float] | None = None
    eps: float | None = None
    weight_decay: float
    momentum: float | None = None
    nesterov: bool | None = None
    clip_grad_norm: float  # 0: off


@dataclass(kw_only=True)
class SchedulerConfig:
    name: SchedulerName
    warmup_steps: int | None = None
    warmup_shape: WarmupShape | None = None
    warmup_start: float | None = None  # None: 1 / warmup_steps
    final: float | None = None
    total_steps: int | None = None  # None: train.steps
    start: float | None = None
    rise_steps: int | None = None
    fall_steps: int | None = None  # None: as rise_steps
    rise_stairs: int | None = None
    fall_stairs: int | None = None  # None: as rise_stairs
    decay_rate: float | None = None
    decay_interval: int | None = None
    step_size: int | None = None
    step_rate: float | None = None
    staircase: bool | None = None


@dataclass(kw_only=True)
class KernelsConfig:
    backend: KernelBackend


@dataclass(kw_only=True)
class CheckpointConfig:
    every: int  # 0: none
    keep: int | None = None
    keep_every: int | None = None  # steps; 0: off
    keep_best: bool | None = None
    asynchronous: bool | None = None
    resume: str | None = None  # a path, or auto


@dataclass(kw_only=True)
class LoggerConfig:
    mode: LoggerMode
    project: str | None = None
    every: int | None = None


@dataclass(kw_only=True)
class LaunchConfig:
    ranks: int | None = None
    threads: int | None = None
    timeout_seconds: float
    device: DeviceName
    elastic: bool | None = None
    min_ranks: int | None = None


@dataclass(kw_only=True)
class Config:
    """One run. `output_dir` is its run folder, absolute."""

    task: TaskConfig
    zero: ZeroConfig
    offload: OffloadConfig
    precision: PrecisionConfig
    recompute: RecomputeConfig
    topology: TopologyConfig
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    kernels: KernelsConfig
    checkpoint: CheckpointConfig
    logger: LoggerConfig
    launch: LaunchConfig
    output_dir: str
