"""Rules that tasks with records and tasks with rollouts share."""

from collections.abc import Iterator

from ztk.config.adapters import starts_adapted
from ztk.config.hugging_face import family_of
from ztk.config.topology import padded_expert_faults, replicas_of, settled_ranks
from ztk.core.policies.config import Config
from ztk.core.policies.machine import Machine
from ztk.core.policies.pipeline import ScheduleName
from ztk.core.policies.prompt_tasks import TASK_LENGTHS, PromptTask
from ztk.core.policies.rollout import RolloutEngineName
from ztk.core.policies.runs import aligns, device_of, distills_draws, draws, is_hugging_face


def aligned_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    """Yields one line per fault, with its fix."""
    if not aligns(config):
        return
    yield from padded_expert_faults(config)
    yield from _warm_start_faults(config, machine=machine)
    if draws(config) or config.task.name == "dpo":
        yield from _adapter_faults(config)
    if draws(config) or distills_draws(config):
        yield from _batch_faults(config, machine=machine)
        if config.rollout.engine is RolloutEngineName.generator:
            yield from _generator_faults(config, machine=machine)


def _warm_start_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    """Yields faults of `warm_start.steps`, each of which is one micro-batch."""
    topology, warm = config.topology, config.warm_start
    if not warm.steps:
        return
    if topology.pipeline > 1 and topology.schedule is ScheduleName.interleaved:
        yield (
            f"topology.schedule=interleaved runs {topology.pipeline} micro-batches or more, and each of "
            f"warm_start.steps={warm.steps} has one; use topology.schedule=1f1b, or warm_start.path=RUN with warm_start.steps=0"
        )
    if config.data.path is not None or (draws(config) and config.rollout.task is None):
        yield (
            "warm_start.steps: answers to learn from are made for rollout.task alone; use warm_start.steps=0, and warm_start.path=RUN "
            "for a model that task=sft has trained"
        )
    if warm.path is not None:
        yield "warm_start.path has no effect with warm_start.steps: use warm_start.steps=0, or leave out warm_start.path"
    if config.lora.rank and is_hugging_face(config.model):
        yield (
            f"warm_start.steps={warm.steps}: would train the adapters, and their reference is the frozen model; use warm_start.steps=0, and "
            "warm_start.path=RUN for adapters that task=sft has trained"
        )
    replicas = replicas_of(topology, ranks=settled_ranks(config, machine=machine))
    if warm.batch_size and warm.batch_size % replicas:
        fixed = -(-warm.batch_size // replicas) * replicas
        yield f"warm_start.batch_size={warm.batch_size} cannot be divided over {replicas} ranks: use warm_start.batch_size={fixed}"


def _adapter_faults(config: Config) -> Iterator[str]:
    """Yields faults of a reference that is the policy without its adapters."""
    section, others = ("kl", "frozen") if draws(config) else ("dpo", "frozen or precomputed")
    if getattr(config, section).reference != "lora_off":
        return
    key = f"{section}.reference"
    if not config.lora.rank:
        yield f"{key}=lora_off: is the policy without its adapters, and there are none; use lora=adapter, or {key}=frozen"
    elif starts_adapted(config):
        yield (
            f"{key}=lora_off: the policy starts with the adapters of warm_start.path={config.warm_start.path}, and its base is another model; "
            f"use {key}={others}"
        )


def step_unit(config: Config, *, machine: Machine) -> int:
    """Returns the sequences that all replicas take in one forward."""
    replicas = replicas_of(config.topology, ranks=settled_ranks(config, machine=machine))
    return replicas * config.train.micro_batch_size


def _batch_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    """Yields a fault if micro-batches of drawn answers would have several shapes."""
    batch, size = config.train.global_batch_size, config.train.micro_batch_size
    if size > 0 and batch is not None and batch % (unit := step_unit(config, machine=machine)):
        drawn = "a rollout" if draws(config) else "draws"
        ranks = unit // size
        other = f", or train.micro_batch_size={batch // ranks}" if 0 < batch < unit and batch % ranks == 0 else ""
        other += "" if draws(config) else ", or distill.fraction=0 without distill.seq_kd"
        yield (
            f"train.global_batch_size={batch} is no multiple of {unit} ({ranks} ranks x train.micro_batch_size={size}), and all "
            f"micro-batches of {drawn} have one shape: use train.global_batch_size={-(-batch // unit) * unit}{other}"
        )


def room_faults(config: Config, *, task: PromptTask, drawn: int) -> Iterator[str]:
    """Yields a fault if a prompt of the built-in task and `drawn` tokens do not fit into a sequence."""
    prompt, _ = TASK_LENGTHS[task]
    if config.data.seq_len < prompt + drawn:
        yield (
            f"data.seq_len={config.data.seq_len}: a prompt of {prompt} and rollout.max_tokens={drawn} do not fit: use "
            f"data.seq_len={prompt + drawn}"
        )


def _generator_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    """One line per choice that does not go with rollout.engine=generator."""
    tensor = config.rollout.tensor or 1
    if (ranks := settled_ranks(config, machine=machine)) % tensor:
        fitting = max(degree for degree in range(1, tensor) if ranks % degree == 0)
        yield f"rollout.tensor={tensor}: {ranks} ranks cannot be divided by it; use rollout.tensor={fitting}"
    if tensor > 1 and not is_hugging_face(config.model):
        heads = (config.model.heads, config.model.kv_heads)
        if heads[1] < tensor and (heads[0] % tensor or tensor % heads[1]):
            yield f"rollout.tensor={tensor}: {heads[0]} query and {heads[1]} key heads cannot be divided by it; use rollout.tensor=1"
    if tensor > 1 and device_of(config, machine=machine) != "cpu":
        yield f"rollout.tensor={tensor}: ranks share a copy of the weights in main memory alone, and this run is on GPUs; use rollout.tensor=1"
    if kind := uncomputed(config):
        yield (
            f"rollout.engine=generator: the inference engine does not compute models of the kind {kind}, of model.path="
            f"{config.model.path}; use rollout.engine=trainer"
        )


def uncomputed(config: Config) -> str | None:
    """Returns the kind of a transformers model that the inference engine does not implement, or None."""
    kind = family_of(config.model)
    if kind is None:
        return None
    from ztk.inference.describe import FAMILIES  # imported late: torch takes a second

    return None if kind in FAMILIES else kind
