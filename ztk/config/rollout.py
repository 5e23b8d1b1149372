"""Rules of `task=grpo` and `task=ppo`."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from ztk.config.aligned import room_faults, step_unit, uncomputed
from ztk.config.hugging_face import dropouts_of
from ztk.config.keys import derive
from ztk.config.other_models import is_text_model, reward_model_faults
from ztk.config.rewards import has_rewards, reward_faults
from ztk.config.topology import (
    critic_faults,
    cut_degrees,
    is_cut,
)
from ztk.core.policies.config import Config
from ztk.core.policies.data import DataName
from ztk.core.policies.machine import Machine
from ztk.core.policies.prompt_tasks import TASK_LENGTHS
from ztk.core.policies.rollout import (
    BaselineName,
    RolloutEngineName,
    RolloutIdentity,
    TransferName,
)
from ztk.core.policies.runs import device_of, distills_draws, draws, has_tokenizer, is_hugging_face


def choose_rollouts(config: Config, *, machine: Machine) -> None:
    """Sets `rollout.engine` and `rollout.identity`, unless the user set them.

    The inference engine generates if it computes the model, and exactly if its bits are the trainer's.
    """
    if not (draws(config) or distills_draws(config)):
        return
    reason = _needs_trainer(config, machine=machine)
    engine = RolloutEngineName.generator if reason is None else RolloutEngineName.trainer
    derive(config, key="rollout.engine", value=engine, reason=reason or "it keeps keys and values")
    if draws(config) and config.rollout.servers:
        reason = "servers draw, whose bits this run does not know"
        derive(config, key="rollout.identity", value=RolloutIdentity.corrected, reason=reason)
    if draws(config) and (inexact := [*_inexact(config, machine=machine)]):
        derive(config, key="rollout.identity", value=RolloutIdentity.corrected, reason=inexact[0].reason)


def _needs_trainer(config: Config, *, machine: Machine) -> str | None:
    """Returns why the trainer's forward has to draw, or None if the inference engine can."""
    rollout = config.rollout
    if rollout.staleness or rollout.servers:
        return None
    is_exact = "rollout.identity" in config.given and rollout.identity is RolloutIdentity.exact
    if is_exact and any(one.is_generators for one in _inexact(config, machine=machine, generates=True)):
        return "rollout.identity=exact needs the trainer's forward here"
    if "rollout.weights" in config.given and rollout.weights is not None:
        return f"rollout.weights={rollout.weights.value} is for its forward"
    if is_cut(config.topology):
        return "every rank has a part of the weights, and the inference engine reads its own"
    if kind := uncomputed(config):
        return f"the inference engine does not compute models of the kind {kind}"
    return None


class _Inexact(NamedTuple):
    """key: the key with its value. reason: why log-probabilities of a rollout differ from the trainer's. fix: another than
    rollout.identity=corrected. is_generators: not with rollout.engine=trainer.
    """

    key: str
    reason: str
    fix: str
    is_generators: bool = False


def _inexact(config: Config, *, machine: Machine, generates: bool | None = None) -> Iterator[_Inexact]:
    """Yields the reasons why rollout.identity=exact cannot be promised. generates: with the inference engine, by default as configured."""
    model, precision = config.model, config.precision
    if config.zero.quantized_weights:
        yield _Inexact(
            "zero.quantized_weights=true", "it rounds parameters at every gather", "zero.quantized_weights=false"
        )
    if precision.float8 is not None:
        reason = "rollouts multiply in precision.dtype"
        yield _Inexact(f"precision.float8={precision.float8}", reason, "precision=bf16")
    if model.experts is not None:
        reason = "how many rows an expert multiplies depends on tokens that are drawn later"
        yield _Inexact(f"model.experts={model.experts}", reason, "model=tiny")
    if config.lora.rank and config.lora.dropout:
        reason = "only the trainer's forward applies dropout"
        yield _Inexact(f"lora.dropout={config.lora.dropout:g}", reason, "lora.dropout=0")
    for name, value in dropouts_of(model).items():
        reason = f"{name}={value:g} in its config.json, and only the trainer's forward applies this dropout"
        yield _Inexact(f"model.path={model.path}", reason, "0 there")
    if config.rollout.staleness:
        reason = "answers are drawn with weights of earlier rollouts"
        key = f"rollout.staleness={config.rollout.staleness}"
        yield _Inexact(key, reason, "rollout.staleness=0", is_generators=True)
    if config.rollout.engine is RolloutEngineName.generator if generates is None else generates:
        yield from _inexact_generator(config, machine=machine)


def _inexact_generator(config: Config, *, machine: Machine) -> Iterator[_Inexact]:
    """Yields reasons of the inference engine, which has the bits of the native decoder in fp32 on a CPU."""
    engine, fix, tensor = "rollout.engine=generator", "rollout.engine=trainer", config.rollout.tensor or 1
    reasons = []
    if config.rollout.servers and (cut := cut_degrees(config.topology)) and cut.keys() != {"tensor"}:
        key = ", ".join(f"topology.{degree}={value}" for degree, value in cut.items())
        reason = "servers divide their model by topology.tensor alone"
        yield _Inexact(key, reason, "topology=tp2 with servers of topology.tensor=2", is_generators=True)
    if device_of(config, machine=machine) != "cpu":
        reasons.append("on a GPU attention over the cache adds in another order than the trainer's")
    if is_hugging_face(config.model):
        reasons.append("attention over a cache adds in another order than the modules of transformers")
    if config.lora.rank:
        reasons.append("it merges adapters into the weights, and the trainer computes them separately")
    if config.precision.dtype != "fp32":
        reasons.append(
            f"it computes in fp32, and precision.dtype={config.precision.dtype} rounds the trainer's products"
        )
    yield from (_Inexact(engine, reason, fix, is_generators=True) for reason in reasons)
    if tensor > 1:
        reason = "sums over parts of a layer round in another way than the trainer's"
        yield _Inexact(f"rollout.tensor={tensor}", reason, "rollout.tensor=1", is_generators=True)


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
    yield from _layout_faults(config)
    if config.rollout.identity is RolloutIdentity.exact:
        for key, reason, fix, _ in _inexact(config, machine=machine):
            yield f"{key}: {reason}, so rollout.identity=exact cannot be promised; use rollout.identity=corrected or off, or {fix}"
    if config.rollout.staleness:
        yield from _staleness_faults(config, machine=machine)


def _layout_faults(config: Config) -> Iterator[str]:
    """Yields faults of ranks that share a model."""
    if config.task.name == "ppo":
        yield from critic_faults(config, needs="a critic")
    elif config.reward.path is not None and not is_text_model(config.reward.path):
        yield from critic_faults(config, needs="the model of reward.path")
    cut = cut_degrees(config.topology)
    key = ", ".join(f"topology.{degree}={value}" for degree, value in cut.items())
    if cut and config.rollout.servers:
        if config.rollout.servers_transfer is not TransferName.gloo:
            yield f"{key}: no rank has full weights to send to rollout.servers; use rollout.servers_transfer=gloo, or topology=dp"
        if config.rollout.staleness and cut.keys() != {"expert"}:
            yield f"{key}: ranks that share a model share answers between steps; use rollout.staleness=0, or topology=dp"
    elif cut and config.rollout.engine is RolloutEngineName.generator:
        yield (
            f"{key}: rollout.engine=generator draws with a rank's own weights, which are a part of the model; use rollout.engine=trainer, or "
            "topology=dp"
        )
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


def _staleness_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    rollout, key = config.rollout, f"rollout.staleness={config.rollout.staleness}"
    if rollout.servers:
        return
    if rollout.engine is RolloutEngineName.trainer or device_of(config, machine=machine) != "cpu":
        where = "on a GPU" if device_of(config, machine=machine) != "cpu" else "with rollout.engine=trainer"
        yield (
            f"{key}: {where} answers are drawn with the weights that are updated; use rollout.engine=generator and "
            "launch.device=cpu, which draws with a copy, or rollout.servers, or rollout.staleness=0"
        )
    if (rollout.tensor or 1) > 1:
        yield f"{key}: ranks that share a copy draw together; use rollout.tensor=1 instead of {rollout.tensor}, or rollout.staleness=0"
    if (rollout.staleness or 0) > 1:
        yield f"{key}: a rank keeps one copy of the weights, which one rollout uses; use rollout.staleness=1, or rollout.servers"


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
    learned = config.reward.path is not None or config.reward.servers
    rewards = has_rewards(config) or learned or rollout.environment is not None
    if rollout.task is None and not rewards:
        yield (
            "reward.function=null: prompts of data.path have no reward of their own; use reward.function=mine.py:score, or reward.path=RUN, "
            "the folder of a run of task=reward"
        )
    yield from reward_faults(config)
    yield from reward_model_faults(config)
    if rollout.task is not None and rollout.max_tokens:
        _, answer = TASK_LENGTHS[rollout.task]
        if rollout.max_tokens < answer:
            yield (
                f"rollout.max_tokens={rollout.max_tokens}: an answer of rollout.task={rollout.task.value} has {answer}: use "
                f"rollout.max_tokens={answer}"
            )
        else:
            yield from room_faults(config, task=rollout.task, drawn=rollout.max_tokens)


def _batch_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    train, rollout = config.train, config.rollout
    if not rollout.prompts or not rollout.group_size or train.micro_batch_size < 1:
        return  # reported by the ranges
    samples = rollout.prompts * rollout.group_size
    batch = train.global_batch_size
    if batch is None:
        batch = step_unit(config, machine=machine) * (train.accumulation_steps or 1)
    if samples % batch:
        step = math.lcm(batch, rollout.group_size)  # multiple of samples that satisfies both
        yield (
            f"rollout.prompts={rollout.prompts} x rollout.group_size={rollout.group_size} = {samples} samples are no multiple of "
            f"{batch}, the samples of an optimizer step: use rollout.prompts={-(-samples // step) * step // rollout.group_size}, "
            f"or a train.global_batch_size that divides {samples}"
        )
    if rollout.group_size < 2 and config.advantage.baseline in (BaselineName.mean, BaselineName.leave_one_out):
        yield (
            f"rollout.group_size={rollout.group_size}: advantage.baseline={config.advantage.baseline.value} compares answers to one "
            "prompt; use rollout.group_size=8, or advantage.baseline=critic"
        )
