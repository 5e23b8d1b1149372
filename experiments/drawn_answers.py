"""Steps of `task=distill` whose answers are sampled by the student or its teacher, and replace the answers in the data."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from ztk.config import Config
from ztk.config.text import encoding_of
from ztk.core.runtime import Process
from ztk.core.runtime.seed import generator
from ztk.experiments.examples import ROW_UNIT, Examples, ExampleStream, Step
from ztk.experiments.prompts import STOP, with_other_ends
from ztk.experiments.rollout_run import open_drawer, open_weights, rollout_policy
from ztk.experiments.streams import share_of
from ztk.rl.align import Sequences, last_answer
from ztk.rl.rollout import Requests, Samples, generate, states_away
from ztk.train.engine import Engine


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
            (open_drawer(config, actor=engine), open_weights(config, actor=engine).weights) if draws else None
            for engine, draws in ((student, distill.fraction), (teacher, distill.seq_kd))
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
