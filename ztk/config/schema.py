"""The typed form of one run: every key's name, type and meaning, which `run.py --help GROUP` prints. `conf/` has the values.

After `ztk.config.to_config` a key without effect is None and a value left open is a number. Buckets: elements; memory: bytes; time: seconds.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ztk.config.align_schema import ChatTemplateName, DpoConfig, SftConfig, TruncationName
from ztk.config.ema_schema import EmaConfig, Evaluated
from ztk.config.eval_schema import EvalConfig
from ztk.config.hardware_schema import HardwareConfig
from ztk.config.inference_schema import InferenceConfig, SamplingConfig, ServeConfig
from ztk.config.key import key
from ztk.config.optimizer_schema import OptimizerConfig
from ztk.config.plan_schema import PlanConfig
from ztk.config.precision_schema import PrecisionConfig
from ztk.config.rollout_schema import (
    AdvantageConfig,
    CriticConfig,
    KlConfig,
    PolicyConfig,
    ReferenceConfig,
    RewardConfig,
    RolloutConfig,
    WarmStartConfig,
)
from ztk.config.scheduler_schema import SchedulerConfig
from ztk.core.policies.pipeline import ScheduleName
from ztk.core.policies.recompute import RecomputeMode
from ztk.core.policies.tier import Tier


class ZeroEngine(StrEnum):
    """Who shards and reduces."""

    ztk = "ztk"  # ztk's own ZeRO, stages 0 to 3
    ddp = "ddp"  # torch.nn.parallel.DistributedDataParallel, to compare with
    fsdp2 = "fsdp2"  # torch.distributed.fsdp.fully_shard, to compare with


# `auto` follows `offload.optimizer` at stage 3 and is `none` below.
# pyrefly: ignore[invalid-literal]  # the members follow another enum
ParameterTier = StrEnum("ParameterTier", ["auto", *Tier])

# Members are named as on the command line, and `1f1b` is no name that a class body can have.
# pyrefly: ignore[invalid-argument]  # the members follow another enum
PipelineSchedule = StrEnum("PipelineSchedule", [(name.value, name.value) for name in ScheduleName])


class DataName(StrEnum):
    """data.name: where sequences come from."""

    stdlib = "stdlib"  # the source code of the Python standard library on this machine
    files = "files"  # whatever `data.path` names
    synthetic = "synthetic"  # random tokens, for benchmarks
    prompts = "prompts"  # what a policy answers: of `rollout.task`, or lines of `data.path`
    chat = "chat"  # answers to learn: made on the spot, or lines of `data.path`
    preferences = "preferences"  # pairs of answers: made on the spot, or lines of `data.path`


class OnError(StrEnum):
    """What becomes of a record that cannot be used."""

    refuse = "refuse"  # before ranks start
    skip = "skip"  # leave it out, and count it


class Packing(StrEnum):
    """data.packing: how documents share sequences."""

    concatenate = "concatenate"  # attention sees across their ends
    documents = "documents"  # a token attends to its own document


class ModelInit(StrEnum):
    """The first values of a Hugging Face model."""

    pretrained = "pretrained"  # the weights in the folder
    random = "random"  # drawn as transformers draws them; the folder needs only its config.json


class KernelBackend(StrEnum):
    """kernels: which implementation of an op runs."""

    auto = "auto"  # Triton on a GPU, torch's vectorised kernels on a CPU
    triton = "triton"  # Triton, or refuse
    reference = "reference"  # the plain torch reference everywhere


class LoggerMode(StrEnum):
    """logger.mode: where wandb writes."""

    offline = "offline"
    online = "online"
    disabled = "disabled"


class DeviceName(StrEnum):
    """launch.device: what ranks run on."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass(kw_only=True)
class TaskConfig:
    """The program that every rank runs."""

    name: str = key("name of the task, wandb's job type")
    module: str = key("module to import; every rank calls its main(config)")


@dataclass(kw_only=True)
class ZeroConfig:
    """Which of optimizer states, gradients and parameters are sharded, and by whom."""

    engine: ZeroEngine = key(
        "who shards and reduces: ztk's own ZeRO; torch's DistributedDataParallel (ddp) or fully_shard (fsdp2), to compare with"
    )
    stage: int | None = key(
        "what is sharded: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too", default=None
    )
    bucket_size: int | None = key("elements of one flat buffer; a larger unit is split", default=None)
    prefetch_bucket_size: int | None = key(
        "elements of parameters gathered ahead of their use, one bucket at least; 0: none; null: a sixteenth of the model's, at most "
        "50,000,000, and none of a model whose buckets are larger than an eighth of it",
        default=None,
    )
    max_live_parameters: int | None = key(
        "nothing is gathered ahead while this many elements are gathered, and no more stay for their next use; null: half of the model's, or "
        "what is in use and gathered ahead if that is more, at most 1,000,000,000; rollouts and batches of pipelines then keep that many",
        default=None,
    )
    max_reuse_distance: int | None = key(
        "a unit stays gathered if it is used again within this many elements", default=None
    )
    overlap_gather: bool | None = key(
        "the next forward begins while updated parameters are gathered, and waits per bucket at its first use",
        default=None,
    )
    param_persistence_threshold: int | None = key(
        "parameters with at most this many elements are never sharded", default=None
    )
    quantized_weights: bool | None = key(
        "all-gather parameters as int8: half the bytes, and ranks compute with what arrives (ZeRO++ qwZ)", default=None
    )
    quantized_gradients: bool | None = key(
        "reduce gradients as int4: a quarter of the bytes (ZeRO++ qgZ)", default=None
    )
    hpz_partition_size: int | None = key(
        "this many neighbouring ranks (a node's GPUs) keep a second copy of the parameters, from which the backward gathers "
        "(ZeRO++ hpZ); 1: off",
        default=None,
    )


@dataclass(kw_only=True)
class OffloadConfig:
    """Where a rank's shards are stored between their uses."""

    optimizer: Tier = key("tier of the optimizer states: none (the device), cpu (main memory), nvme (files)")
    parameters: ParameterTier = key(
        "tier of the parameters; auto: as offload.optimizer at stage 3, on the device below"
    )
    nvme_path: str | None = key("folder on the disk to use; null: nvme/ in the run folder", default=None)
    buffer_count: int | None = key("buffers of the pool through which shards pass", default=None)
    buffer_bytes: int | None = key("bytes of one buffer; less if the largest shard needs less", default=None)
    block_bytes: int | None = key(
        "bytes of one read or write. Main memory per rank is at most buffer_count * buffer_bytes + threads * block_bytes",
        default=None,
    )
    threads: int | None = key("reads and writes under way at the same time", default=None)
    pin_memory: bool | None = key("page-locked buffers, for copies to and from a GPU; null: true", default=None)
    direct_io: bool | None = key("read and write past the page cache (O_DIRECT)", default=None)


@dataclass(kw_only=True)
class RecomputeConfig:
    """Which activations the backward computes again instead of reading them (activation checkpointing)."""

    mode: RecomputeMode = key(
        "what a block saves: none: all its activations; full: its input alone; selective: its input and the results of matrix "
        "products and attention"
    )
    every: int | None = key("recompute one block of this many", default=None)
    inputs_on_cpu: bool | None = key("keep a block's input in main memory, pinned beside a GPU", default=None)
    partition_inputs: bool | None = key("each tensor-parallel rank keeps its part of a block's input", default=None)
    contiguous: bool | None = key("keep inputs in one buffer, allocated once", default=None)
    num_checkpoints: int | None = key("inputs that this buffer holds; null: one per recomputed block", default=None)


@dataclass(kw_only=True)
class TopologyConfig:
    """How the ranks divide the model: degrees of pipeline, tensor, sequence, context, expert and data parallelism."""

    pipeline: int = key("pipeline-parallel degree: the layers are split into this many stages")
    tensor: int = key("tensor-parallel degree: each layer is split over this many ranks")
    expert: int = key("expert-parallel degree: experts are spread over this many of the data-parallel ranks")
    sequence: int = key("sequence-parallel degree (Ulysses): each sequence is split over this many ranks")
    context: int = key(
        "context-parallel degree (ring attention): each sequence is split over this many ranks, before topology.sequence splits it"
    )
    data: int | None = key("data-parallel degree: batches at a time; null: as many as the ranks allow")
    sequence_parallel: bool | None = key(
        "norms and residuals work on a part of the sequence per tensor-parallel rank (Megatron's sequence parallelism)"
    )
    schedule: PipelineSchedule | None = key(
        "order of a pipeline's micro-batches: gpipe: all forwards, then all backwards; 1f1b: in turn, so fewer are alive; "
        "interleaved: 1f1b over several stages per rank; zero_bubble: 1f1b whose gradients of weights fill the bubble"
    )
    virtual_stages: int | None = key("stages per rank of the interleaved schedule")
    partition: str | None = key(
        "what is equal between stages: uniform (number of layers), parameters, type:PATTERN (layers of these classes) or profile "
        "(measured time)"
    )
    max_local_gradients: int | None = key(
        "up to this many elements, gradients are summed over micro-batches before they are reduced"
    )


@dataclass(kw_only=True)
class ModelConfig:
    """The decoder: ztk's own, a Llama-like transformer, dense or with experts; or a causal model of transformers (model=hf), whose sizes are
    those of its config.json."""

    name: str = key("name of the model, for the record; hf: the model of transformers in model.path")
    path: str | None = key(
        "folder with the config.json, and for model.init=pretrained the safetensors files", default=None
    )
    init: ModelInit | None = key("first weights: pretrained: the folder's; random: drawn from train.seed", default=None)
    kernels: bool | None = key(
        "ztk's kernels compute norms, gated MLPs and attention where they compute the same as the model's modules on a sample",
        default=None,
    )
    vocab_size: int = key("tokens of the vocabulary; it follows data.tokenizer, and bytes are 256")
    dim: int = key("width of the residual stream")
    layers: int = key("number of blocks")
    heads: int = key("query heads")
    kv_heads: int = key("key and value heads (grouped-query attention)")
    hidden_dim: int | None = key("hidden width of the SwiGLU, in a model with experts of the blocks without them")
    max_seq_len: int = key("longest sequence in tokens")
    rope_theta: float | None = key("base of the rotary embedding's wavelengths")
    norm_eps: float | None = key("added to the mean square in RMSNorm")
    tie_embeddings: bool | None = key("the output layer is the embedding's weight")
    experts: int | None = key("experts of a block that has them; null: the model is dense", default=None)
    experts_per_token: int | None = key("experts that a token is sent to", default=None)
    experts_every: int | None = key("every n-th block has experts, the last of each n", default=None)
    expert_hidden_dim: int | None = key("hidden width of the SwiGLU in an expert", default=None)
    shared_hidden_dim: int | None = key(
        "hidden width of the expert that every token uses; 0: there is none", default=None
    )
    balance_loss_weight: float | None = key(
        "weight of the load-balancing loss, which is 1 when experts are used evenly", default=None
    )
    router_z_loss_weight: float | None = key(
        "weight of the mean squared logsumexp of the router's logits", default=None
    )


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters: the model is frozen, and small products beside its linear layers train."""

    rank: int = key("rank of an adapter; 0: the model itself trains")
    alpha: float | None = key("what an adapter adds is multiplied by alpha / rank", default=None)
    targets: Any = key("all-linear, or ends of names of linear layers, as in [q_proj,v_proj]", default=None)
    dropout: float | None = key("dropout of an adapter's inputs, a probability", default=None)


@dataclass(kw_only=True)
class DataConfig:
    """The tokens to train on."""

    name: DataName = key(
        "stdlib: the source code of this machine's Python standard library; files: what data.path names; synthetic: random "
        'tokens; prompts: of rollout.task, or data.path\'s lines {"prompt": ...} or {"messages": ...}; chat: made on the spot, or '
        'data.path\'s lines {"messages": ...} or {"prompt": ..., "answer": ...}; preferences: likewise, lines {"prompt": ..., "chosen": '
        '..., "rejected": ...}'
    )
    path: Any = key("a file, a folder, a glob, or a list of them", default=None)
    tokenizer: str | None = key(
        "bytes; train: a byte-level BPE of data.vocab_size tokens, made on the training text; or a folder with a tokenizer.json. "
        "model.vocab_size follows it unless it is given",
        default=None,
    )
    vocab_size: int | None = key("tokens of data.tokenizer=train, the bytes and the end token included", default=None)
    field: str | None = key("field of jsonl and column of parquet that has the text", default=None)
    mixture: list[float] | None = key(
        "weights of the entries of data.path, as in [0.7,0.3]: parts of the training sequences; null: one order over all documents",
        default=None,
    )
    packing: Packing | None = key(
        "documents in a sequence: concatenate: attention sees across their ends; documents: a token attends to its own document alone",
        default=None,
    )
    on_error: OnError | None = key(
        "what becomes of broken records and files: refuse: the run does not start; skip: they are left out and counted",
        default=None,
    )
    chat_template: ChatTemplateName | None = key(
        "how messages become tokens of data.tokenizer. tokenizer: by the chat template of its folder, as transformers renders it; roles: lines "
        "<|role|>, and the end token behind an answer",
        default=None,
    )
    truncate_prompts: TruncationName | None = key(
        "what goes of a prompt that leaves no room for rollout.max_tokens in data.seq_len: left: its beginning; right: its end; null: it is "
        "refused",
        default=None,
    )
    stop: int | None = key("byte that ends an answer of data=chat and data=preferences; 10: a line end", default=None)
    validation_fraction: float | None = key("part of the text held out for evaluation", default=None)
    seq_len: int = key("tokens per sequence; of records in data.path the longest text, where it is not given")


@dataclass(kw_only=True)
class TrainConfig:
    """Length, batch and evaluation of a run. `train` has no options, only keys."""

    steps: int = key("optimizer steps")
    micro_batch_size: int = key("sequences per rank and forward, at most")
    accumulation_steps: int | None = key(
        "forwards per optimizer step; null: 1, or as many as train.global_batch_size takes", default=None
    )
    global_batch_size: int | None = key(
        "sequences per optimizer step over all ranks, any number; null: replicas * micro_batch_size * accumulation_steps",
        default=None,
    )
    seed: int = key("seed of the initial weights and of the order of the data")
    log_every: int = key("steps between rows of metrics.jsonl")
    eval_every: int | None = key(
        "steps between held-out evaluations, one more follows the last step; 0: that one alone", default=None
    )
    eval_batches: int | None = key("global batches of one evaluation", default=None)
    max_seconds: float | None = key(
        "seconds of training after which the run ends, from this start on, with the step under way; null: no limit",
        default=None,
    )
    until_loss: float | None = key(
        "held-out loss at which the run ends, compared at every evaluation; null: none", default=None
    )
    evaluate: Evaluated | None = key(
        "whose held-out losses and sample of text: weights: those that train; ema: their moving average, see ema.decay; null: weights",
        default=None,
    )
    quick: bool | None = key(
        "no evaluation, no sample of text and no picture, as for a comparison of speeds; null: false", default=None
    )
    profile: str | None = key(
        "START:STOP: of the steps START to STOP every rank writes a trace and the memory's course into the folder profile; null: none",
        default=None,
    )
    z_loss: float | None = key(
        "weight of the mean squared logsumexp of the output logits, added to the training loss; 1e-4 in PaLM; null or 0: none",
        default=None,
    )


@dataclass(kw_only=True)
class KernelsConfig:
    """What computes ztk's operations."""

    backend: KernelBackend = key(
        "auto: Triton on a GPU, torch's vectorised kernels on a CPU; triton: Triton or refuse; reference: plain torch"
    )
    log_every: int | None = key(
        "steps between those whose operations are timed, a multiple of train.log_every: milliseconds, calls, rate and share of the floor of "
        "each; 0: none",
        default=None,
    )


@dataclass(kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    every: int = key("steps between checkpoints; 0: none")
    last: bool | None = key("the last step is saved, whatever ends the run", default=True)
    grace_seconds: float | None = key(
        "after Ctrl-C or SIGTERM the step that runs has so long to end and to be saved; a second signal ends the run at once",
        default=30.0,
    )
    keep: int | None = key("how many of the newest are kept", default=None)
    keep_every: int | None = key("beside them those of every so many steps are kept; 0: none", default=None)
    keep_best: bool | None = key(
        "and the one with the smallest held-out loss, which is then measured before every save", default=None
    )
    asynchronous: bool | None = key("training goes on while the files are written", default=None)
    resume: str | None = key(
        "run folder or checkpoint to continue from; auto: the run folder's own latest if it has one; null: from the start",
        default=None,
    )
    allow_changes: bool | None = key(
        "continue although keys that change numbers, such as optimizer.lr, differ from those of the checkpoint's run",
        default=None,
    )

    @property
    def saves(self) -> bool:
        """Whether the run writes checkpoints."""
        return bool(self.every or self.last)


@dataclass(kw_only=True)
class LoggerConfig:
    """wandb. metrics.jsonl and summary.json are written in any case."""

    mode: LoggerMode = key(
        "offline: wandb writes into the run folder; online: to its server, needs a login; disabled: no wandb"
    )
    project: str | None = key("wandb's project", default=None)
    every: int | None = key("steps between rows given to wandb, a multiple of train.log_every", default=None)


@dataclass(kw_only=True)
class LaunchConfig:
    """The ranks of a run. Under torchrun or srun they are there already: only threads, timeout_seconds and device count."""

    ranks: int | None = key(
        "number of ranks; null: what the topology needs, else one per GPU, two without a GPU", default=None
    )
    threads: int | None = key(
        "CPU threads per rank; null: OMP_NUM_THREADS, else the cores divided by the ranks", default=None
    )
    timeout_seconds: float = key("how long a collective may wait for a rank, in seconds")
    device: DeviceName = key("where the ranks compute; auto: on GPUs if there are any")
    elastic: bool | None = key(
        "when ranks are killed, go on with the others from the latest checkpoint, with the same global batch",
        default=None,
    )
    min_ranks: int | None = key("fewest ranks to go on with", default=None)


@dataclass(kw_only=True)
class Config:
    """One run. `output_dir` is its run folder, absolute. user: the user's own keys, by attribute or item: a mapping, or a dataclass.
    own: section -> the node of an object of the user's, see `ztk.config.own`. reasons: of derived values, by key. notes: for the terminal."""

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
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    user: Any = field(default_factory=dict)
    own: Any = field(default_factory=dict)
    output_dir: str

    def __post_init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self.notes: list[str] = []
