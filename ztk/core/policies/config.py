"""One run: every section of keys, its type and its place on the command line.

After `ztk.config.to_config` a key without effect is None and a value left open is a number. Buckets: elements; memory: bytes; time: seconds.
"""

from dataclasses import dataclass, field
from typing import Any

from ztk.core.policies.align import DistillConfig, DpoConfig, SftConfig
from ztk.core.policies.data import DataConfig
from ztk.core.policies.ema import EmaConfig
from ztk.core.policies.evaluation import EvalConfig
from ztk.core.policies.hardware import HardwareConfig
from ztk.core.policies.inference import InferenceConfig, SamplingConfig, ServeConfig
from ztk.core.policies.launch import LaunchConfig
from ztk.core.policies.model import LoraConfig, ModelConfig
from ztk.core.policies.offload import OffloadConfig
from ztk.core.policies.optimizer import OptimizerConfig
from ztk.core.policies.plan import PlanConfig
from ztk.core.policies.precision import PrecisionConfig
from ztk.core.policies.recompute import RecomputeConfig
from ztk.core.policies.reward import RewardConfig
from ztk.core.policies.rollout import (
    AdvantageConfig,
    CriticConfig,
    KlConfig,
    PolicyConfig,
    ReferenceConfig,
    RolloutConfig,
    WarmStartConfig,
)
from ztk.core.policies.schedule import SchedulerConfig
from ztk.core.policies.topology import TopologyConfig
from ztk.core.policies.train import CheckpointConfig, KernelsConfig, LoggerConfig, TaskConfig, TrainConfig
from ztk.core.policies.zero import ZeroConfig


@dataclass(kw_only=True)
class Config:
    """One run. `output_dir` is its run folder, absolute. user: the user's own keys, by attribute or item: a mapping, or a dataclass.
    own: section -> the node of a user's object, see `ztk.config.own`. given: the keys that the user set, and the groups whose option the
    command line chooses. reasons: explanations of derived values, by key. notes: lines that the command prints before the run starts.
    overwrites: whether the run replaces the one in its folder (checkpoint.resume=overwrite).
    """

    task: TaskConfig
    zero: ZeroConfig
    offload: OffloadConfig
    precision: PrecisionConfig
    recompute: RecomputeConfig
    topology: TopologyConfig
    model: ModelConfig
    lora: LoraConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    kernels: KernelsConfig
    checkpoint: CheckpointConfig
    logger: LoggerConfig
    launch: LaunchConfig
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    dpo: DpoConfig = field(default_factory=DpoConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    user: Any = field(default_factory=dict)
    own: Any = field(default_factory=dict)
    output_dir: str

    def __post_init__(self) -> None:
        self.given: frozenset[str] = frozenset()
        self.reasons: dict[str, str] = {}
        self.notes: list[str] = []
        self.overwrites = False
