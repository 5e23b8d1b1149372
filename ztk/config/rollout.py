"""Rules of `task=grpo` and `task=ppo`."""

import math
from collections.abc import Iterator

from ztk.config.adapters import starts_adapted
from ztk.config.derived import derive
from ztk.config.environments import environment_faults
from ztk.config.hugging_face import dropouts_of, family_of
from ztk.config.machine import Machine
from ztk.config.other_models import is_text_model, reward_model_faults
from ztk.config.rewards import has_rewards, reward_faults
from ztk.config.topology import (
    DEGREES,
    critic_faults,
    is_cut,
    model_ranks,
    padded_expert_faults,
    replicas_of,
    settled_ranks,
    warm_start_faults,
)
from ztk.core.policies.config import Config
from ztk.core.policies.data import DataName
from ztk.core.policies.prompt_tasks import TASK_LENGTHS
from ztk.core.policies.rollout import (
    BaselineName,
    ReferenceName,
    RolloutEngineName,
    RolloutIdentity,
)
from ztk.core.policies.runs import device_of, distills_draws, draws, has_tokenizer, is_hugging_face
from ztk.core.policies.zero import ZeroEngine


def choose_rollouts(config: Config, *, given: frozenset[str], machine: Machine) -> None:
    """Sets `rollout.engine` and `rollout.identity` of a run on GPUs or with `rollout.ahead`, unless the user set them.

    On GPUs the inference engine generates if it implements the model.

    given: the keys that the user set.
    """
    if not (draws(config) or distills_draws(config)):
        return
    rollout = config.rollout
    if rollout.ahead:
        _choose_ahead(config, given=given)
    if device_of(config, machine=machine) != "cuda":
        return
    if "rollout.engine" not in given:
        engine, reason = _engine_of_gpus(config, given=given)
        derive(config, key="rollout.engine", value=engine, reason=reason)
    if draws(config) and rollout.engine is RolloutEngineName.generator and "rollout.identity" not in given:
        reason = "on a GPU attention over the cache adds in another order than the trainer's"
        derive(config, key="rollout.identity", value=RolloutIdentity.corrected, reason=reason)


def _choose_ahead(config: Config, *, given: frozenset[str]) -> None:
    if "rollout.engine" not in given:
        reason = "rollout.ahead=1 draws with a copy of the weights"
        derive(config, key="rollout.engine", value=RolloutEngineName.generator, reason=reason)
    if "rollout.identity" not in given:
        reason = "rollout.ahead=1 draws with weights of one rollout before"
        derive(config, key="rollout.identity", value=RolloutIdentity.corrected, reason=reason)


def _engine_of_gpus(config: Config, *, given: frozenset[str]) -> tuple[RolloutEngineName, str]:
    """Returns the engine that generates on a GPU, and the reason."""
    if "rollout.identity" in given and config.rollout.identity is RolloutIdentity.exact:
        return RolloutEngineName.trainer, "rollout.identity=exact needs the trainer's forward on a GPU"
    if "rollout.weights" in given and config.rollout.weights is not None:
        return RolloutEngineName.trainer, f"rollout.weights={config.rollout.weights.value} is for its forward"
    if is_cut(config.topology):
        return (
            RolloutEngineName.trainer,
            "every rank has a part of the weights, and on a GPU the inference engine reads its own",
        )
    if kind := _uncomputed(config):
        return RolloutEngineName.trainer, f"the inference engine does not compute models of the kind {kind}"
    return RolloutEngineName.generator, "on a GPU: a cache, and the trainer's own weights"


def _uncomputed(config: Config) -> str | None:
    """Returns the kind of a transformers model that the inference engine does not implement, or None."""
    kind = family_of(config.model)
    if kind is None:
        return None
    from ztk.inference.describe import FAMILIES  # imported late: torch takes a second

    return None if kind in FAMILIES else kind


def rollout_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    """Yields one line per fault, with its fix."""
    name = config.task.name
    if not draws(config):
        if config.data.name is DataName.prompts:
            yield f"data=prompts: task={name} reads text; use data=stdlib, or task=grpo"
        return
    yield from _strategy_faults(config, machine=machine)
    yield from _data_faults(config)
    yield from _batch_faults(config, machine=machine)


def _strategy_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    name = config.task.name
    yield from _layout_faults(config, machine=machine)
    yield from warm_start_faults(config)
    if config.zero.engine is not ZeroEngine.ztk:
        yield f"zero={config.zero.engine.value}: is there to compare with, and task={name} needs ztk's; use zero=stage0 to stage3"
    if config.zero.quantized_weights and config.rollout.identity is RolloutIdentity.exact:
        yield (
            "zero.quantized_weights=true rounds parameters at every gather, so rollout.identity=exact cannot be promised; use "
            "rollout.identity=corrected, or zero.quantized_weights=false"
        )
    if config.precision.float8 is not None and config.rollout.identity is RolloutIdentity.exact:
        yield (
            f"precision.float8={config.precision.float8}: rollouts multiply in precision.dtype, so rollout.identity=exact cannot be promised; "
            "use rollout.identity=corrected, or precision=bf16"
        )
    if config.model.experts is not None and config.rollout.identity is RolloutIdentity.exact:
        yield (
            f"model.experts={config.model.experts}: how many rows an expert multiplies depends on tokens that are drawn later, so "
            "rollout.identity=exact cannot be promised; use rollout.identity=corrected, or model=tiny"
        )
    if config.rollout.ahead:
        yield from _ahead_faults(config, machine=machine)
    if config.rollout.engine is RolloutEngineName.generator:
        yield from generator_faults(config, machine=machine)
    if config.rollout.identity is RolloutIdentity.exact:
        yield from _dropout_faults(config)
    if config.launch.elastic:
        yield f"launch.elastic=true: task={name} does not go on with fewer ranks yet; use launch.elastic=false"
    if config.train.log_every != 1:
        yield f"train.log_every={config.train.log_every}: task={name} has a row for every step; use train.log_every=1"
    if config.checkpoint.asynchronous:
        yield (
            f"checkpoint.asynchronous=true: task={name} saves a critic or a reference together with the policy; use "
            "checkpoint.asynchronous=false"
        )


def _layout_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    """Yields faults of ranks that share a model."""
    name, topology = config.task.name, config.topology
    yield from padded_expert_faults(config)
    if name == "ppo":
        yield from critic_faults(config, needs="a critic")
    elif config.reward.path is not None and not is_text_model(config.reward.path):
        yield from critic_faults(config, needs="the model of reward.path")
    cut = {degree: value for degree in DEGREES if (value := getattr(topology, degree)) > 1}
    key = ", ".join(f"topology.{degree}={value}" for degree, value in cut.items())
    if cut and config.rollout.engine is RolloutEngineName.generator:
        yield from _gathering_faults(config, machine=machine, key=key)
    cut.pop("expert", None)
    if not cut:
        return
    key = ", ".join(f"topology.{degree}={value}" for degree, value in cut.items())
    if config.rollout.environment is not None:
        yield (
            f"{key}: an environment is called on every rank that shares the model, and their turns may differ; use topology=dp with "
            "rollout.environment"
        )
    if is_text_model(config.reward.path) and set(cut) != {"tensor"}:
        yield (
            f"{key}: the model of reward.path={config.reward.path} is from transformers and has neither stages nor parts of sequences; use "
            "topology.tensor alone, or topology=dp"
        )


def _gathering_faults(config: Config, *, machine: Machine, key: str) -> Iterator[str]:
    """Yields faults of an inference engine whose weights are gathered from ranks that have parts of them, into main memory."""
    fix = "use rollout.engine=trainer, or topology=dp"
    if device_of(config, machine=machine) != "cpu":
        yield f"{key}: on a GPU rollout.engine=generator draws with a rank's own weights, which are a part of the model; {fix}"
    elif is_hugging_face(config.model):
        yield f"{key}: rollout.engine=generator reads sizes of models of transformers from their layers, which are cut; {fix}"
    elif config.lora.rank:
        yield f"{key}: rollout.engine=generator merges adapters into full layers, and these are cut; {fix}"
    if config.rollout.identity is RolloutIdentity.exact:
        yield (
            f"{key}: rollout.engine=generator draws with full layers and the trainer adds up parts of them, so rollout.identity=exact cannot "
            "be promised; use rollout.identity=corrected or off, or rollout.engine=trainer"
        )
    if (config.rollout.tensor or 1) > 1:
        yield f"{key}: the inference engine gets full weights; use rollout.tensor=1 instead of {config.rollout.tensor}, or topology=dp"
    sharing, samples = model_ranks(config.topology), (config.rollout.prompts or 0) * (config.rollout.group_size or 0)
    samples //= replicas_of(config.topology, ranks=settled_ranks(config, machine=machine))
    if 0 < samples < sharing:
        yield (
            f"{key}: rollout.prompts={config.rollout.prompts} x rollout.group_size={config.rollout.group_size} are {samples} answers for "
            f"{sharing} ranks, each of which draws one or more with rollout.engine=generator; use more rollout.prompts"
        )
    if config.rollout.ahead and sharing > 1:
        yield f"{key}: ranks that share a model exchange its answers, which stops its training; use rollout.ahead=0, or topology=dp"


def _ahead_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    rollout = config.rollout
    if rollout.identity is RolloutIdentity.exact:
        yield (
            "rollout.ahead=1: answers are drawn with weights of one rollout before, so rollout.identity=exact cannot hold; use "
            "rollout.identity=corrected, or rollout.ahead=0"
        )
    if rollout.engine is RolloutEngineName.trainer or device_of(config, machine=machine) != "cpu":
        where = "on a GPU" if device_of(config, machine=machine) != "cpu" else "with rollout.engine=trainer"
        yield (
            f"rollout.ahead=1: {where} answers are drawn with the weights that are updated; use rollout.engine=generator and "
            "launch.device=cpu, which draws with a copy, or rollout.ahead=0"
        )
    if (rollout.tensor or 1) > 1:
        yield f"rollout.ahead=1: ranks that share a copy draw together; use rollout.tensor=1, or rollout.ahead=0, instead of {rollout.tensor}"


def generator_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    """One line per choice that does not go with rollout.engine=generator."""
    tensor = config.rollout.tensor or 1
    if (ranks := settled_ranks(config, machine=machine)) % tensor:
        fitting = max(degree for degree in range(1, tensor) if ranks % degree == 0)
        yield f"rollout.tensor={tensor}: {ranks} ranks cannot be divided by it; use rollout.tensor={fitting}"
    if tensor > 1 and config.rollout.identity is RolloutIdentity.exact:
        yield (
            f"rollout.tensor={tensor}: sums over parts of a layer round in another way than the trainer's, so rollout.identity=exact cannot be "
            "promised; use rollout.identity=corrected or off, or rollout.tensor=1"
        )
    if tensor > 1 and not is_hugging_face(config.model):
        heads = (config.model.heads, config.model.kv_heads)
        if heads[1] < tensor and (heads[0] % tensor or tensor % heads[1]):
            yield f"rollout.tensor={tensor}: {heads[0]} query and {heads[1]} key heads cannot be divided by it; use rollout.tensor=1"
    on_gpus = device_of(config, machine=machine) != "cpu"
    if tensor > 1 and on_gpus:
        yield f"rollout.tensor={tensor}: ranks share a copy of the weights in main memory alone, and this run is on GPUs; use rollout.tensor=1"
    if config.rollout.identity is RolloutIdentity.exact:
        yield from _exact_generator_faults(config, on_gpus=on_gpus)
    if kind := _uncomputed(config):
        yield (
            f"rollout.engine=generator: the inference engine does not compute models of the kind {kind}, of model.path="
            f"{config.model.path}; use rollout.engine=trainer"
        )


def _exact_generator_faults(config: Config, *, on_gpus: bool) -> Iterator[str]:
    """Yields faults of rollout.identity=exact with the inference engine.

    On a CPU the engine is bitwise equal to the native decoder in fp32, if the trainer's forward uses the engine's attention.
    """
    fix = "cannot be promised; use rollout.identity=corrected or off, or rollout.engine=trainer"
    if on_gpus:
        yield (
            "rollout.engine=generator: on a GPU attention over the cache adds in another order than the trainer's, so "
            f"rollout.identity=exact {fix}"
        )
        return
    if is_hugging_face(config.model):
        yield (
            "rollout.engine=generator: attention over a cache adds in another order than the modules of transformers, so "
            f"rollout.identity=exact {fix}"
        )
    if config.lora.rank:
        yield (
            "rollout.engine=generator: it merges adapters into the weights, and the trainer computes them separately, so "
            f"rollout.identity=exact {fix}"
        )
    if config.precision.dtype != "fp32":
        yield (
            f"rollout.engine=generator: it computes in fp32, and precision.dtype={config.precision.dtype} rounds the trainer's products, so "
            f"rollout.identity=exact {fix}"
        )


def _dropout_faults(config: Config) -> Iterator[str]:
    """Yields faults of dropout: the trainer's forward drops values, and a rollout does not."""
    if config.lora.rank and config.lora.dropout:
        yield (
            f"lora.dropout={config.lora.dropout:g}: only the trainer's forward applies dropout, so rollout.identity=exact cannot be "
            "promised; use lora.dropout=0, or rollout.identity=corrected"
        )
    for name, value in dropouts_of(config.model).items():
        yield (
            f"model.path={config.model.path}: {name}={value:g} in its config.json, and only the trainer's forward applies this dropout, so "
            f"rollout.identity=exact cannot be promised; put 0 there, or use rollout.identity=corrected"
        )


def _data_faults(config: Config) -> Iterator[str]:
    data, rollout = config.data, config.rollout
    if data.name is not DataName.prompts:
        yield f"data={data.name.value}: task={config.task.name} answers prompts; use data=prompts"
        return
    if config.model.vocab_size > 256 and not (has_tokenizer(config) and data.path is not None):
        fix = "data.path=PROMPTS.jsonl and data.tokenizer=FOLDER" if data.path is None else "data.tokenizer=FOLDER"
        fix = fix if is_hugging_face(config.model) else f"model.vocab_size=256, or {fix}"
        yield f"model.vocab_size={config.model.vocab_size}: prompts and answers are bytes, and others could be drawn: use {fix}"
    if rollout.task is None and data.path is None:
        yield "rollout.task=null: there are no prompts; use rollout.task=sorting, or data.path=FILE.jsonl with reward.function"
    rewards = has_rewards(config) or config.reward.path is not None or rollout.environment is not None
    if rollout.task is None and not rewards:
        yield (
            "reward.function=null: prompts of data.path have no reward of their own; use reward.function=mine.py:score, or reward.path=RUN, "
            "the folder of a run of task=reward"
        )
    yield from reward_faults(config)
    yield from reward_model_faults(config)
    yield from environment_faults(config)
    yield from _first_weights_faults(config)
    if rollout.task is not None and rollout.max_tokens:
        prompt, answer = TASK_LENGTHS[rollout.task]
        if rollout.max_tokens < answer:
            yield (
                f"rollout.max_tokens={rollout.max_tokens}: an answer of rollout.task={rollout.task.value} has {answer}: use "
                f"rollout.max_tokens={answer}"
            )
        elif data.seq_len < prompt + rollout.max_tokens:
            yield (
                f"data.seq_len={data.seq_len}: a prompt of {prompt} and rollout.max_tokens={rollout.max_tokens} do not fit: use "
                f"data.seq_len={prompt + rollout.max_tokens}"
            )


def _first_weights_faults(config: Config) -> Iterator[str]:
    warm = config.warm_start
    if config.rollout.task is None and warm.steps:
        yield (
            "warm_start.steps: answers to learn from are made for rollout.task alone; use warm_start.steps=0, and warm_start.path=RUN "
            "for a model that task=sft has trained"
        )
    elif warm.path is not None and warm.steps:
        yield "warm_start.path has no effect with warm_start.steps: use warm_start.steps=0, or leave out warm_start.path"
    if config.lora.rank and warm.steps and is_hugging_face(config.model):
        yield (
            f"warm_start.steps={warm.steps}: would train the adapters, and their reference is the frozen model; use warm_start.steps=0, and "
            "warm_start.path=RUN for adapters that task=sft has trained"
        )
    if config.kl.reference is ReferenceName.lora_off and starts_adapted(config):
        yield (
            f"kl.reference=lora_off: the policy starts with the adapters of warm_start.path={warm.path}, and its base is another model; use "
            "kl.reference=frozen"
        )


def _batch_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    train, rollout = config.train, config.rollout
    if not rollout.prompts or not rollout.group_size or train.micro_batch_size < 1:
        return  # reported by the ranges
    samples = rollout.prompts * rollout.group_size
    warm = config.warm_start
    batch = train.global_batch_size
    replicas = replicas_of(config.topology, ranks=settled_ranks(config, machine=machine))
    unit = replicas * train.micro_batch_size
    if batch is None:
        batch = unit * (train.accumulation_steps or 1)
    if warm.steps and warm.batch_size and warm.batch_size % replicas:
        fixed = -(-warm.batch_size // replicas) * replicas
        yield f"warm_start.batch_size={warm.batch_size} cannot be divided over {replicas} ranks: use warm_start.batch_size={fixed}"
    if batch % unit:
        yield (
            f"train.global_batch_size={batch} is no multiple of {unit} ({replicas} ranks x train.micro_batch_size="
            f"{train.micro_batch_size}), and all micro-batches of a rollout have one shape: use "
            f"train.global_batch_size={-(-batch // unit) * unit}"
        )
    if samples % batch:
        step = math.lcm(batch, rollout.group_size)  # multiple of samples that satisfies both
        yield (
            f"rollout.prompts={rollout.prompts} x rollout.group_size={rollout.group_size} = {samples} samples are no multiple of "
            f"{batch}, the samples of an optimizer step: use rollout.prompts={-(-samples // step) * step // rollout.group_size}"
        )
    if rollout.group_size < 2 and config.advantage.baseline in (BaselineName.mean, BaselineName.leave_one_out):
        yield (
            f"rollout.group_size={rollout.group_size}: advantage.baseline={config.advantage.baseline.value} compares answers to one "
            "prompt; use rollout.group_size=8, or advantage.baseline=critic"
        )
