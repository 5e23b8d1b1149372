"""Knowledge distillation: a student learns a teacher's next-token distributions. The program of every rank of `task=distill`."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ztk.config import Config, config_with
from ztk.core.runtime import Process
from ztk.experiments import policies
from ztk.experiments.alignment import (
    Measured,
    evaluate_pairs,
    load_weights,
    open_stream,
    run_examples,
    start_from,
    train_pairs,
)
from ztk.experiments.answers import Answers
from ztk.experiments.drawn_answers import DistillStream
from ztk.experiments.examples import MicroBatch, Step
from ztk.experiments.models import build
from ztk.experiments.packing import packs_examples
from ztk.experiments.ranks import started
from ztk.rl.align import DistillPolicy, distill_losses
from ztk.rl.rollout import Layout, answer_logit_loss, logits_by_part
from ztk.train.engine import Engine


def main(config: Config) -> None:
    """Runs one rank from start to end. Raises ValueError for a configuration that does not fit the model, the data or the ranks."""
    with started(config) as process:
        run(config, process=process)


def run(config: Config, *, process: Process) -> dict[str, float]:
    """Builds, trains and evaluates. Returns the results of the last evaluation."""
    examples = open_stream(config, process=process)
    engine = build(config, process=process, lr_table=policies.learning_rates(config))
    start_from(config, engine=engine)
    teacher = open_teacher(config, process=process)
    examples.packs = packs_examples(config, policy=engine, reference=teacher)
    stream = DistillStream(config, stream=examples, student=engine, teacher=teacher)
    forward = partial(forward_of, engine, teacher=teacher, policy=policy_of(config))
    answers = Answers(config, engine=engine, reference=teacher, packs=examples.packs)

    def train_step(step: Step) -> Measured:
        found = train_pairs(engine, step=step, forward=forward)
        return replace(found, sums=counts_of(step, is_own=stream.is_own, device=process.device))

    after = run_examples(
        config,
        engine=engine,
        examples=examples,
        stream=stream,
        train_step=train_step,
        evaluate=lambda: evaluate_pairs(engine, stream=examples, forward=forward) | answers.measure(),
    )
    teacher.close()
    return after


def open_teacher(config: Config, *, process: Process) -> Engine:
    """Opens the model of `distill.teacher`, under the run's strategy unless `reference` differs. A collective call.

    Raises CheckpointError.
    """
    path = config.distill.teacher
    assert path is not None, "the configuration is checked"
    own = config_with(config, path=path, key="distill.teacher")
    engine = build(own, process=process, is_trained=False, strategy=config.reference)
    if (
        own.model.path != path
    ):  # differs from the step of a run: a transformers model starts from the values in its folder
        load_weights(own, engine=engine, path=path)
    return engine


def policy_of(config: Config) -> DistillPolicy:
    """Returns the loss that `distill` describes."""
    return DistillPolicy(beta=config.distill.beta, temperature=config.distill.temperature)


def forward_of(
    engine: Engine, step: Step, index: int, *, teacher: Engine, policy: DistillPolicy
) -> tuple[Layout, Callable[[Any], tuple[Tensor, dict[str, Tensor]]]]:
    """Returns a micro-batch's layout, and the function to its part of the step's loss, the mean divergence over the step's answer tokens."""
    batch = step.micro_batches[index]
    layout, mask = step.layout(batch, module=engine.module, device=engine.process.device), step.mask(batch)

    def losses_of(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
        teacher_logits = logits_of(teacher, step=step, batch=batch)

        def loss_of(logits: Tensor, cut: slice) -> Tensor:
            return distill_losses(logits, teacher=teacher_logits(cut), policy=policy).sum()

        total = answer_logit_loss(model, layout=layout, mask=mask, loss_of=loss_of)
        return total / step.num_answer_tokens, {}

    return layout, losses_of


def logits_of(teacher: Engine, *, step: Step, batch: MicroBatch) -> Callable[[slice], Tensor]:
    """Returns a function that computes the teacher's logits [n, V] of a slice of a micro-batch's answer tokens, in the order of its
    mask.
    """
    layout, mask = step.layout(batch, module=teacher.module, device=teacher.process.device), step.mask(batch)
    with teacher.evaluating():
        return logits_by_part(teacher, layout=layout, mask=mask)


def counts_of(step: Step, *, is_own: bool, device: torch.device) -> dict[str, Tensor]:
    """Returns sums over this rank's answers for the means of a row: `own`, 1 if the student sampled them, and `length`, their tokens."""
    batches = [batch.sequences for batch in step.micro_batches if not batch.is_filler]
    counted = {"own": is_own * sum(map(len, batches)), "length": sum(int(batch.answer.sum()) for batch in batches)}
    return {name: torch.tensor(float(value), device=device) for name, value in counted.items()}
