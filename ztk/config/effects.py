"""Which keys have an effect in which runs.

A key without effect in a run is refused if the user set it, and set to None if it comes from an option file, so that the recorded
configuration shows what took part. A key that has an effect needs a value.
"""

from collections.abc import Callable

from ztk.config.align_effects import ALIGN_EFFECTS, reads_records
from ztk.config.data_effects import DATA_EFFECTS
from ztk.config.effect import Effect, keys_of
from ztk.config.eval_schema import EvalEngine
from ztk.config.hardware_schema import HardwareConfig
from ztk.config.hugging_face import is_hugging_face
from ztk.config.inference_schema import CacheKind, SamplingConfig, ServeConfig
from ztk.config.keys import read, write, written
from ztk.config.machine import Machine
from ztk.config.optimizer_effects import OPTIMIZER_EFFECTS
from ztk.config.own import is_own, is_own_key
from ztk.config.precision_schema import DType
from ztk.config.scheduler_effects import SCHEDULER_EFFECTS
from ztk.config.schema import (
    Config,
    DataName,
    LoggerMode,
    ParameterTier,
    PipelineSchedule,
    ZeroEngine,
)
from ztk.core.policies.recompute import RecomputeMode
from ztk.core.policies.tier import Tier

DRAWING = ("generate", "serve")  # tasks that answer prompts and train nothing
ANSWERING = (*DRAWING, "eval")  # those and the one that scores texts
_SHARED = tuple(
    f"inference.{name}"
    for name in ("max_sequences", "max_step_tokens", "cache", "cache_tokens", "cache_dtype", "exact")
)
_MODEL = "task=generate, task=serve or task=eval"
NOTHING = {
    "train.eval_every": 0,
    "checkpoint.last": False,
}  # values that ask for what happens anyway where the key has no effect
CEILINGS = ("memory_bandwidth", "bf16_rate", "fp16_rate", "fp32_rate")  # what floors of kernels are counted with


def offloads(config: Config, *, tier: Tier) -> bool:
    """Whether anything is stored on `tier`. Parameters on `auto` never use another tier than the optimizer states."""
    return tier in (config.offload.optimizer, config.offload.parameters)


def others_offload(config: Config, *, tier: Tier) -> bool:
    """Whether a model beside the policy, or the average of the weights, is stored on `tier` by a choice of its own."""
    return tier in (config.reference.offload, config.critic.offload, config.reward.offload, config.ema.offload)


def _on_nvme(config: Config, machine: Machine) -> bool:
    return offloads(config, tier=Tier.nvme)


def _validates(config: Config) -> bool:
    """Whether held-out data can be evaluated; own data hold some out if they have a method `held_out`."""
    return config.data.name in (DataName.stdlib, DataName.files) or is_own(config, section="data")


def times_kernels(config: Config) -> bool:
    """Whether the run times operations in some of its steps."""
    return config.task.name not in (*ANSWERING, "plan") and bool(config.kernels.log_every)


def device_of(config: Config, *, machine: Machine) -> str:
    """`cpu` or `cuda`."""
    if config.task.name == "plan":
        return "cuda"  # a plan is that of GPUs, wherever it is made
    if config.launch.device == "auto":
        return "cuda" if machine.gpus and not _needs_cpu(config) else "cpu"
    return config.launch.device.value


def by_training(config: Config) -> bool:
    """Whether the engine that trains scores texts."""
    return config.task.name == "eval" and config.eval.engine is EvalEngine.training


def infers(config: Config) -> bool:
    """Whether the inference engine computes the model."""
    return config.task.name in ANSWERING and not by_training(config)


def _needs_cpu(config: Config) -> bool:
    """Whether the task answers in a way that only the CPU has: layers that are streamed or shared by ranks, or a cache of slabs."""
    only = streams_layers(config) or config.topology.tensor > 1 or config.inference.cache is CacheKind.slabs
    return infers(config) and only


def streams_layers(config: Config) -> bool:
    """Whether a task that answers reads layers from files in every pass; with a cache of blocks files take preempted sequences' blocks."""
    return config.offload.optimizer is not Tier.none and config.inference.cache is not CacheKind.blocks


def _answers(config: Config, machine: Machine) -> bool:
    """Whether the task computes a model and trains nothing."""
    return config.task.name in ANSWERING


def _infers(config: Config, machine: Machine) -> bool:
    return infers(config)


def _prompted(config: Config, machine: Machine) -> bool:
    """Whether the task answers prompts."""
    return config.task.name in DRAWING


def _trains(config: Config) -> bool:
    return config.task.name not in (*ANSWERING, "plan")


def _is(task: str) -> Callable[[Config, Machine], bool]:
    return lambda c, m: c.task.name == task


EFFECTS = (
    Effect(keys=("zero.stage",), when=lambda c, m: c.zero.engine is ZeroEngine.ztk, only="zero=stage0 to stage3"),
    Effect(keys=("zero.bucket_size",), when=lambda c, m: c.zero.engine is ZeroEngine.ztk, only="zero=stage0 to stage3"),
    Effect(
        keys=keys_of(
            "zero",
            "max_reuse_distance",
            "param_persistence_threshold",
            "quantized_weights",
            "hpz_partition_size",
        ),
        when=lambda c, m: c.zero.stage == 3,
        only="zero=stage3",
    ),
    Effect(
        keys=("zero.overlap_gather",),
        when=lambda c, m: c.zero.stage in (1, 2),
        only="zero=stage1 or zero=stage2",
        required=False,
    ),
    Effect(
        keys=keys_of("zero", "prefetch_bucket_size", "max_live_parameters"),
        when=lambda c, m: c.zero.stage == 3,
        only="zero=stage3",
        required=False,
    ),
    Effect(
        keys=keys_of("offload", "buffer_count", "buffer_bytes"),
        when=lambda c, m: _on_nvme(c, m) and not infers(c),
        only="offload=nvme in a run that trains",
    ),
    Effect(keys=keys_of("offload", "block_bytes", "threads", "direct_io"), when=_on_nvme, only="offload=nvme"),
    Effect(
        keys=("offload.nvme_path",),
        when=lambda c, m: _on_nvme(c, m) or others_offload(c, tier=Tier.nvme),
        only="offload=nvme, or ema.offload, reference.offload, critic.offload or reward.offload",
        required=False,
    ),
    Effect(
        keys=("offload.pin_memory",),
        when=lambda c, m: (_on_nvme(c, m) or offloads(c, tier=Tier.cpu)) and device_of(c, machine=m) == "cuda",
        only="offload=cpu or offload=nvme beside a GPU",
        required=False,
    ),
    Effect(
        keys=keys_of(
            "model",
            *("experts_per_token", "experts_every", "expert_hidden_dim", "shared_hidden_dim"),
            *("balance_loss_weight", "router_z_loss_weight"),
        ),
        when=lambda c, m: c.model.experts is not None and not is_hugging_face(c.model),
        only="model=tiny_moe and others with model.experts",
    ),
    Effect(
        keys=keys_of("model", "hidden_dim", "rope_theta", "norm_eps", "tie_embeddings"),
        when=lambda c, m: not is_hugging_face(c.model),
        only="ztk's own decoder, such as model=tiny",
    ),
    Effect(
        keys=keys_of("lora", "alpha", "targets", "dropout"),
        when=lambda c, m: c.lora.rank > 0,
        only="lora=adapter, or lora.rank above 0",
    ),
    Effect(
        keys=keys_of("model", "path", "init", "kernels"), when=lambda c, m: is_hugging_face(c.model), only="model=hf"
    ),
    Effect(
        keys=("zero.quantized_gradients",),
        when=lambda c, m: c.zero.engine is ZeroEngine.ztk and (c.zero.stage or 0) >= 2,
        only="zero=stage2 or zero=stage3",
    ),
    Effect(
        keys=("topology.sequence_parallel",),
        when=lambda c, m: c.topology.tensor > 1,
        only="topology=tp2 and others with topology.tensor above 1",
    ),
    Effect(
        keys=keys_of("topology", "schedule", "partition"),
        when=lambda c, m: c.topology.pipeline > 1,
        only="topology=pp2 and others with topology.pipeline above 1",
    ),
    Effect(
        keys=("topology.virtual_stages",),
        when=lambda c, m: c.topology.pipeline > 1 and c.topology.schedule is PipelineSchedule("interleaved"),
        only="topology.schedule=interleaved and topology.pipeline above 1",
    ),
    Effect(
        keys=("topology.max_local_gradients",),
        when=lambda c, m: c.topology.pipeline > 1 and (c.zero.stage or 0) >= 2,
        only="zero=stage2 or stage3 and topology.pipeline above 1",
    ),
    Effect(
        keys=keys_of("precision.loss_scale", "dynamic", "initial"),
        when=lambda c, m: c.precision.dtype is DType.fp16,
        only="precision=fp16",
    ),
    Effect(
        keys=keys_of("precision.loss_scale", "window", "hysteresis", "floor"),
        when=lambda c, m: c.precision.dtype is DType.fp16 and c.precision.loss_scale.dynamic is not False,
        only="precision=fp16 with precision.loss_scale.dynamic=true",
    ),
    Effect(
        keys=keys_of("recompute", "every", "inputs_on_cpu", "contiguous"),
        when=lambda c, m: c.recompute.mode is not RecomputeMode.none,
        only="recompute=full, selective or every2",
    ),
    Effect(
        keys=("recompute.partition_inputs",),
        when=lambda c, m: (
            c.recompute.mode is not RecomputeMode.none and c.topology.tensor > 1 and not c.topology.sequence_parallel
        ),
        only="recompute=full, selective or every2, topology.tensor above 1 and topology.sequence_parallel=false",
    ),
    Effect(
        keys=("recompute.num_checkpoints",),
        when=lambda c, m: bool(c.recompute.contiguous),
        only="recompute.contiguous=true",
        required=False,
    ),
    *DATA_EFFECTS,
    Effect(
        keys=("train.eval_every", "train.eval_batches"),
        when=lambda c, m: (_validates(c) or reads_records(c)) and not c.train.quick,
        only="data=stdlib, files, chat, preferences or own data, and without train.quick",
    ),
    Effect(keys=("train.quick",), when=lambda c, m: c.task.name == "pretrain", only="task=pretrain", required=False),
    Effect(
        keys=("train.max_seconds",), when=lambda c, m: c.task.name == "pretrain", only="task=pretrain", required=False
    ),
    Effect(
        keys=("train.until_loss",),
        when=lambda c, m: c.task.name == "pretrain" and _validates(c) and not c.train.quick,
        only="task=pretrain with data=stdlib, data=files or own data, and without train.quick",
        required=False,
    ),
    Effect(
        keys=("ema.decay",),
        when=lambda c, m: c.task.name in ("pretrain", "plan") and c.zero.engine is ZeroEngine.ztk,
        only="task=pretrain or task=plan, and zero=stage0 to stage3",
        required=False,
    ),
    Effect(keys=("ema.every",), when=lambda c, m: bool(c.ema.decay), only="ema.decay above 0"),
    Effect(keys=("ema.offload",), when=lambda c, m: bool(c.ema.decay), only="ema.decay above 0", required=False),
    Effect(
        keys=("train.evaluate",),
        when=lambda c, m: c.task.name == "pretrain" and _validates(c) and not c.train.quick,
        only="task=pretrain with data=stdlib, data=files or own data, and without train.quick",
        required=False,
    ),
    Effect(
        keys=("train.z_loss",),
        when=lambda c, m: c.task.name in ("pretrain", "plan"),
        only="task=pretrain",
        required=False,
    ),
    *OPTIMIZER_EFFECTS,
    *SCHEDULER_EFFECTS,
    Effect(
        keys=("checkpoint.last",),
        when=lambda c, m: _trains(c) and c.zero.engine is ZeroEngine.ztk,
        only="tasks that train, such as task=pretrain, and zero=stage0 to stage3",
        required=False,
    ),
    Effect(
        keys=("checkpoint.grace_seconds",),
        when=lambda c, m: _trains(c) and c.checkpoint.saves,
        only="tasks that train, such as task=pretrain, and checkpoint=last or checkpoint=periodic",
    ),
    Effect(
        keys=keys_of("checkpoint", "keep", "keep_every", "asynchronous"),
        when=lambda c, m: c.checkpoint.every != 0,
        only="checkpoint.every above 0",
    ),
    Effect(
        keys=("checkpoint.keep_best",),
        when=lambda c, m: c.checkpoint.every != 0 and _validates(c),
        only="checkpoint.every above 0 and data=stdlib, data=files or own data",
    ),
    Effect(
        keys=("checkpoint.allow_changes",),
        when=lambda c, m: c.checkpoint.resume is not None,
        only="checkpoint.resume",
        required=False,
    ),
    Effect(
        keys=("launch.elastic",),
        when=lambda c, m: not m.started_ranks,
        only="python run.py; torchrun starts ranks again by itself, with --max-restarts",
    ),
    Effect(
        keys=("launch.min_ranks",),
        when=lambda c, m: bool(c.launch.elastic) and not m.started_ranks,
        only="launch.elastic=true",
    ),
    Effect(
        keys=keys_of("logger", "project", "every"),
        when=lambda c, m: c.logger.mode is not LoggerMode.disabled,
        only="logger=offline or online",
    ),
    *ALIGN_EFFECTS,
    Effect(keys=("inference.model",), when=_answers, only=f"{_MODEL}, and inference.model=FOLDER"),
    Effect(keys=("inference.weights",), when=_infers, only=f"{_MODEL}, and without eval.engine=training"),
    Effect(
        keys=("inference.memory_bytes",),
        when=lambda c, m: infers(c) and _on_nvme(c, m),
        only="task=generate, serve or eval and offload=nvme",
        required=False,
    ),
    Effect(
        keys=(
            "inference.lookup_tokens",
            *keys_of("sampling", *(n for n in vars(SamplingConfig()) if n not in ("stop", "max_tokens"))),
        ),
        when=_prompted,
        only="task=generate or task=serve",
    ),
    Effect(
        keys=(
            *keys_of("inference", "max_model_len", "held_out", "draft_model", "generation_config"),
            *keys_of("sampling", "stop", "max_tokens"),
        ),
        when=_prompted,
        only="task=generate or task=serve",
        required=False,
    ),
    Effect(
        keys=("inference.draft_tokens",),
        when=lambda c, m: _prompted(c, m) and c.inference.draft_model is not None,
        only="inference.draft_model=FOLDER, and task=generate or task=serve",
    ),
    Effect(keys=_SHARED, when=_infers, only=f"{_MODEL}, and without eval.engine=training", required=False),
    Effect(keys=("inference.ema",), when=_answers, only=_MODEL, required=False),
    Effect(keys=("inference.prompts",), when=_is("generate"), only="task=generate", required=False),
    Effect(
        keys=keys_of("serve", *(n for n in vars(ServeConfig()) if n not in ("model_name", "api_key_variable"))),
        when=_is("serve"),
        only="task=serve",
    ),
    Effect(keys=("serve.model_name", "serve.api_key_variable"), when=_is("serve"), only="task=serve", required=False),
    Effect(keys=("eval.record",), when=_is("eval"), only="task=eval"),
    Effect(
        keys=keys_of("eval", "engine", "path", "choices", "seq_len"), when=_is("eval"), only="task=eval", required=False
    ),
    Effect(
        keys=keys_of("eval", "field", "stride"),
        when=lambda c, m: c.task.name == "eval" and c.eval.path is not None,
        only="task=eval and eval.path=FILE",
        required=False,
    ),
    Effect(
        keys=("train.profile",),
        when=lambda c, m: c.task.name not in (*ANSWERING, "plan"),
        only="tasks that train, such as task=pretrain",
        required=False,
    ),
    Effect(
        keys=("kernels.log_every",),
        when=lambda c, m: c.task.name not in ANSWERING,
        only="tasks that train, such as task=pretrain",
    ),
    Effect(
        keys=keys_of("hardware", "name", "file", *CEILINGS),
        when=lambda c, m: c.task.name == "plan" or times_kernels(c),
        only="task=plan or kernels.log_every above 0, and hardware=NAME",
        required=False,
    ),
    Effect(
        keys=keys_of("hardware", *(name for name in vars(HardwareConfig()) if name not in ("name", "file", *CEILINGS))),
        when=lambda c, m: c.task.name == "plan",
        only="task=plan and hardware=NAME",
        required=False,
    ),
    Effect(
        keys=("plan.way", "plan.fp8", "plan.again"),
        when=lambda c, m: c.task.name == "plan" and c.hardware.name is not None,
        only="task=plan and hardware=NAME",
        required=False,
    ),
    Effect(keys=("plan.search",), when=_is("plan"), only="task=plan", required=False),
    Effect(
        keys=("plan.traced",),
        when=lambda c, m: c.task.name == "plan" and bool(c.plan.search),
        only="task=plan and plan.search=true",
        required=False,
    ),
)


def effect_faults(config: Config, *, given: frozenset[str], machine: Machine) -> list[str]:
    """One line per key in `given` without effect, and per group of keys that need a value and have none."""
    faults = []
    missing: dict[str, list[str]] = {}
    for effect in EFFECTS:
        acts = effect.when(config, machine)
        for key in effect.keys:
            if is_own_key(config, key=key):
                continue
            value = read(config, key=key)
            if not acts and key in given and value is not None and value != NOTHING.get(key):
                faults.append(f"{key}={written(value)} has no effect here, only with {effect.only}: leave it out")
            if acts and effect.required and value is None:
                missing.setdefault(effect.only, []).append(key)
    faults += [f"{', '.join(keys)} must have a value: choose {only}" for only, keys in missing.items()]
    return faults


def null_inactive_keys(config: Config, *, machine: Machine) -> None:
    """Sets the keys without effect to None."""
    for effect in EFFECTS:
        if not effect.when(config, machine):
            for key in effect.keys:
                write(config, key=key, value=None)


def settle_parameter_tier(config: Config) -> None:
    """`auto` becomes the optimizer states' tier where parameters are sharded, else the device."""
    if config.offload.parameters is ParameterTier.auto:
        sharded = config.zero.stage == 3
        config.offload.parameters = ParameterTier[config.offload.optimizer.name] if sharded else ParameterTier("none")
