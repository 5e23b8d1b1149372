"""Knowledge distillation: a student learns a teacher's next-token distributions. The program of every rank of `task=distill`."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ztk.config import Config, config_with
from ztk.config.text import encoding_of
from ztk.core.policies.key import policy_of
from ztk.core.runtime import Process
from ztk.core.runtime.seed import generator
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
from ztk.experiments.examples import ROW_UNIT, Examples, ExampleStream, MicroBatch, Step
from ztk.experiments.models import build
from ztk.experiments.packing import packs_examples
from ztk.experiments.policy_run import open_drawer, open_weights, rollout_policy, with_own_processes
from ztk.experiments.prompts import STOP, with_other_ends
from ztk.experiments.ranks import started
from ztk.experiments.rollouts import HeldOutAnswers
from ztk.experiments.streams import share_of
from ztk.rl.align import DistillPolicy, Sequences, distill_losses, last_answer
from ztk.rl.rollout import (
    Layout,
    Requests,
    Samples,
    ServedRollouts,
    answer_logit_loss,
    generate,
    logits_by_part,
    states_away,
)
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
    forward = partial(forward_of, engine, teacher=teacher, policy=policy_of(DistillPolicy, given=config.distill))
    answers = HeldOutAnswers(config, engine=engine, reference=teacher, packs=examples.packs)

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
    stream.close()
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


class DistillStream:
    """The steps of a stream, of which `distill.fraction` have the student's answers, and with `distill.seq_kd` the others the teacher's.

    Sampling in a step depends only on its number and the places of its examples, so a resumed run samples the same answers.
    """

    def __init__(self, config: Config, *, stream: ExampleStream, student: Engine, teacher: Engine) -> None:
        """Raises ValueError for a text of `rollout.stop` with several tokens."""
        distill, self._config = config.distill, config
        self._stream, self._engine = stream, student
        self._share = share_of(config, process=student.process)
        self._student, self._teacher = (
            (open_drawer(own, actor=engine), open_weights(config, actor=engine).weights) if draws else None
            for own, engine, draws in (
                (config, student, distill.fraction),
                (with_own_processes(config), teacher, distill.seq_kd),
            )
        )
        self._stops = stops_of(config, examples=stream.examples) if self._student or self._teacher else ()
        self.is_own = False  # whether the latest step has the student's answers

    def next_step(self) -> Step:
        """Returns this rank's part of the next examples, with the answers to learn. A collective call."""
        step, number = self._stream.next_step(), self._engine.global_steps
        chance = torch.rand((), generator=generator(self._config.train.seed, "distill", number)).item()
        self.is_own = self._student is not None and chance < self._config.distill.fraction
        drawing = self._student if self.is_own else self._teacher
        if drawing is None:
            return step
        rollouts, weights = drawing
        policy = rollout_policy(self._config, stops=self._stops, weights=weights, packs=self._stream.packs)
        options = {"policy": policy, "requests": self._requests(step), "step": number}
        with nullcontext() if rollouts.copies_weights else states_away(self._engine):
            samples = generate(rollouts, **options)
        return answered(step, samples=samples, process=self._engine.process)

    def close(self) -> None:
        """Ends the threads of servers that draw."""
        if self._student is not None and isinstance(self._student[0], ServedRollouts):
            self._student[0].close()

    def state_dict(self) -> dict[str, object]:
        """Returns the position, the same on all ranks."""
        return self._stream.state_dict()

    def _requests(self, step: Step) -> Requests:
        places = [place for index in range(len(step.micro_batches)) for place in self._share.sequences(index)]
        prompts = [prompt for batch in step.micro_batches for prompt in prompts_of(batch.sequences)]
        numbers = torch.tensor(places)
        return Requests(prompts=prompts, numbers=numbers, prompt_numbers=numbers, copies=torch.zeros_like(numbers))


def stops_of(config: Config, *, examples: Examples) -> tuple[int, ...]:
    """Returns the tokens that end the data's answers, and those that `rollout.stop` and the model's generation_config.json add."""
    if examples.num_records is None:
        ends = [STOP]
    else:
        texts = (example.texts[0] for example in examples.records)
        ends = sorted({int(text.tokens[text.last_answer.stop - 1]) for text in texts})
    return with_other_ends(ends, config=config, tokenizer=encoding_of(config).tokenizer)


def prompts_of(sequences: Sequences) -> list[Sequence[int]]:
    """Returns the tokens before the last answer of each sequence."""
    lengths = sequences.lengths.tolist()
    parts = zip(sequences.tokens.split(lengths), sequences.answer.split(lengths), strict=True)
    return [tokens[: last_answer(counts).start].tolist() for tokens, counts in parts]


def answered(step: Step, *, samples: Samples, process: Process) -> Step:
    """Returns the step with these answers to its prompts. A collective call."""
    batches, first = [], 0
    for batch in step.micro_batches:
        rows = samples[first : first + len(batch.sequences)]
        first += len(rows)
        is_token = torch.arange(rows.tokens.shape[1]) < rows.lengths.unsqueeze(1)
        sequences = Sequences(tokens=rows.tokens[is_token], lengths=rows.lengths, answer=rows.answer_mask[is_token])
        batches.append(replace(batch, sequences=sequences))
    own = torch.stack([samples.lengths.sum(), samples.answer_lengths.sum(), samples.lengths.max()])
    ranks = process.comm.gather_scalars(own.double().to(process.device), label="draws").cpu()
    tokens, answer_tokens = int(ranks[:, 0].sum()), int(ranks[:, 1].sum())
    length = min(samples.tokens.shape[1], -(-int(ranks[:, 2].max()) // ROW_UNIT) * ROW_UNIT)
    return replace(
        step,
        micro_batches=batches,
        num_tokens=tokens,
        num_answer_tokens=answer_tokens,
        num_text_tokens=tokens - step.num_examples,
        length=length,
    )
