"""Rules of `task=sft`, `task=reward`, `task=dpo` and `task=distill`."""

import math
from collections.abc import Iterator

from ztk.config.aligned import room_faults
from ztk.config.hugging_face import adds_router_losses, takes_documents
from ztk.config.lengths import KEY, mismatched_fault, mismatched_lengths, records_of
from ztk.config.other_models import teacher_faults
from ztk.config.topology import critic_faults, cut_degrees
from ztk.core.policies.align import WITHOUT_REFERENCE, DpoLossName, DpoReferenceName
from ztk.core.policies.config import Config
from ztk.core.policies.data import DataName
from ztk.core.policies.machine import Machine
from ztk.core.policies.prompt_tasks import TASK_LENGTHS, PromptTask
from ztk.core.policies.reward import RewardLossName
from ztk.core.policies.runs import (
    ALIGNING,
    ANSWER_TASKS,
    RECORDS,
    distills_draws,
    has_tokenizer,
    is_hugging_face,
    is_labelled,
)


def alignment_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    """Yields one line per fault, with its fix."""
    name, data = config.task.name, config.data.name
    if name not in ALIGNING:
        if data in RECORDS:
            yield f"data={data.value}: records are for task=sft, reward, dpo and distill; use one of them, or another data than {data.value}"
        return
    if name in ANSWER_TASKS and data not in RECORDS:
        yield f"data={data.value}: task={name} learns answers; use data=chat or data=preferences (of which the chosen answers are learnt)"
    elif name not in ANSWER_TASKS and data is not DataName.preferences:
        yield f"data={data.value}: task={name} compares two answers; use data=preferences"
    else:
        yield from _record_faults(config)
    yield from _strategy_faults(config)
    yield from _loss_faults(config)
    if name == "distill":
        yield from teacher_faults(config)


def _record_faults(config: Config) -> Iterator[str]:
    """Reads every record, so that a bad one is reported before ranks start."""
    data = config.data
    if data.path is None:
        task = config.rollout.task or PromptTask.sorting
        prompt, answer = TASK_LENGTHS[task]
        drawn = config.rollout.max_tokens or 0 if distills_draws(config) else 0
        if drawn > answer:
            yield from room_faults(config, task=task, drawn=drawn)
        elif data.seq_len < (longest := prompt + answer):
            yield f"data.seq_len={data.seq_len}: texts of rollout.task={task.value} have {longest} tokens; use data.seq_len={longest}"
        return
    if not data.seq_len or not (data.stop or has_tokenizer(config)):
        return  # reported by the ranges
    try:
        examples = records_of(config, seq_len=None if KEY in config.reasons else data.seq_len)
    except ValueError as error:
        yield from str(error).splitlines()
        return
    if data.eval_path is not None and {"data.validation_fraction", "train.eval_batches"} & config.given:
        key = next(key for key in ("data.validation_fraction", "train.eval_batches") if key in config.given)
        yield f"{key} has no effect with data.eval_path, of which all records are evaluated: leave it out"
    if len(examples) < 2 and data.validation_fraction:
        yield "data.path has one record, and data.validation_fraction holds one out: use data.validation_fraction=0"
    if is_labelled(config) and sum(mismatched_lengths(examples)) > data.seq_len:
        yield mismatched_fault(examples, limit=f"data.seq_len={data.seq_len}")
    if distills_draws(config) and config.rollout.max_tokens:
        yield from _room_faults([example.texts[0].last_answer.start for example in examples], config=config)
    is_per_token = config.task.name == "reward" and config.reward.loss is RewardLossName.per_token
    if is_per_token and (count := sum(not math.isnan(example.margin) for example in examples)):
        yield (
            f'data.path has {count} records with a "margin": reward.loss=per_token has none; use reward.loss=bradley_terry, or records '
            "without it"
        )


def _room_faults(prompts: list[int], *, config: Config) -> Iterator[str]:
    """Yields a fault if sampled answers do not fit after prompts of these lengths."""
    longest, answer, length = max(prompts), config.rollout.max_tokens or 0, config.data.seq_len
    if longest + answer > length:
        yield (
            f"data.path: the longest prompt has {longest} tokens and with rollout.max_tokens={answer} does not fit into data.seq_len={length}: "
            f"use data.seq_len={longest + answer}, or rollout.max_tokens={max(1, length - longest)}"
        )


def _strategy_faults(config: Config) -> Iterator[str]:
    name = config.task.name
    if config.model.experts is not None:
        yield from _router_faults(config)
    if name == "distill":
        for degree, value in cut_degrees(config.topology).items():
            yield (
                f"topology.{degree}={value}: task=distill reads the model's output of full sequences on every rank; use topology=dp, "
                f"or topology.{degree}=1"
            )
    elif name == "reward":
        yield from critic_faults(config, needs="a reward model")


def _router_faults(config: Config) -> Iterator[str]:
    """Yields faults of padded rows in a router's load-balancing loss. Packed texts have none."""
    reason = "pads rows, and the padding would count in the router's load-balancing loss"
    if config.task.name == "distill":
        yield f"model.experts={config.model.experts}: task=distill {reason}; use model=nano or another dense model"
    elif config.task.name == "sft" and adds_router_losses(config.model) and not takes_documents(config.model):
        yield f"model.path={config.model.path}: output_router_logits is true in its config.json, task=sft {reason}; put false there"


def _loss_faults(config: Config) -> Iterator[str]:
    dpo = config.dpo
    if config.task.name == "reward" and config.data.path is None and is_hugging_face(config.model):
        yield "model=hf: pairs of the built-in task are bytes; use data.path=PAIRS.jsonl and data.tokenizer=FOLDER"
    if config.task.name in ("dpo", "distill") and config.model.vocab_size > 256 and config.data.path is None:
        fix = "data.path=RECORDS.jsonl" if is_hugging_face(config.model) else "model.vocab_size=256"
        yield f"model.vocab_size={config.model.vocab_size}: answers are bytes, and others could be drawn: use {fix}"
    if config.task.name == "dpo":
        if dpo.loss is DpoLossName.kto and dpo.reference in (DpoReferenceName.none, DpoReferenceName.precomputed):
            yield (
                f"dpo.reference={dpo.reference.value}: dpo.loss=kto compares answers to other prompts of the step with the reference, too; use "
                "dpo.reference=frozen or lora_off"
            )
        if dpo.loss in WITHOUT_REFERENCE and dpo.reference is DpoReferenceName.precomputed:
            yield (
                f"dpo.reference=precomputed: dpo.loss={dpo.loss.value} has no reference, and one that measures the divergence has to compute "
                "answers that are drawn; use dpo.reference=none or frozen"
            )
        if dpo.loss is DpoLossName.kto and config.train.global_batch_size == 1:
            yield (
                "train.global_batch_size=1: dpo.loss=kto compares an answer with those to other prompts of the step; use "
                "train.global_batch_size=2 or more"
            )
