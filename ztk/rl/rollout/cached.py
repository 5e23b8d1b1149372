"""Generates samples with the inference engine and its key-value cache: an answer of n tokens takes n steps of one row instead of n full
forwards.

torch's attention adds over the keys in another order than the engine's, so log-probabilities differ in their last bits, unless the
trainer uses `attention.EngineAttention`. Otherwise the loss must be corrected (`rollout.identity=corrected`) or ignore the difference.

[Note: Weights on the device] By kernels, a generator exists for one rollout. Its weights are the trainer's parameters: embedding,
output, MLP and head are views; query, key and value, which are one product, are concatenated into new memory. At stage 3 the parameters
are gathered for the rollout. Keys and values get the memory that the rollout's texts can need, or less if the device has less. All of it
is freed before the update.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from ztk.core.runtime.comm import Comm
from ztk.inference import Completion, Generator, InferencePolicy, SamplingParams
from ztk.inference.opening import UnreadModel
from ztk.nn.lora import merged_parameters
from ztk.rl.rollout.buffer import Samples
from ztk.rl.rollout.hybrid import Requests, TurnDraws
from ztk.rl.rollout.kept import Entries
from ztk.rl.rollout.routing import experts_of
from ztk.rl.rollout.weights import RolloutPolicy
from ztk.train.engine import Engine

_MOST, _MOST_ON_DEVICE, _STEP_TOKENS = 64, 256, 2048  # answers at a time, and tokens per step


class CachedRollouts:
    """Generates answers with a `Generator` and the policy's weights, with adapters merged.

    kernels: the same as in `InferencePolicy`, by default True on a GPU. Without kernels every rank has an fp32 copy of the weights
    in main memory, renewed on the first samples after an optimizer step of the policy. With kernels, the weights are the engine's own, on
    its device and in its dtype; see [Note: Weights on the device].
    comm: communicates between ranks that share a copy, each with a part of every layer. Without it every rank has its own copy, and ranks
    generate independently.
    """

    def __init__(self, engine: Engine, *, comm: Comm | None = None, kernels: bool | None = None) -> None:
        self._source = Merged(engine)
        by_kernels = engine.process.device.type != "cpu" if kernels is None else kernels
        self.copies_weights = not by_kernels
        self._comm = None if comm is None or comm.size == 1 else comm
        self._generator: Generator | None = None
        self._step = -1  # policy step of the copy

    @contextmanager
    def turns(self, *, policy: RolloutPolicy, requests: Requests, step: int) -> Iterator[TurnDraws]:
        """Yields the draws of `Rollouts.turns`. One generator draws all turns and keeps keys and values of as many texts as it has slots.

        With a copy of its own draws may be made on another thread, while the engine steps. Raises ValueError for a model that the
        inference engine does not support.
        """
        keys = requests.keys(seed=policy.seed, step=step)
        sampling = sampling_of(policy, keys=keys, as_trainer=self.copies_weights)
        engine = self._source.engine
        if not self.copies_weights:
            with _opened(engine, length=policy.length, sequences=len(sampling)) as generator:
                yield self._turns(generator, sampling=sampling, policy=policy)
            return
        ranks = 1 if self._comm is None else self._comm.size
        generator = self._loaded(policy, sequences=len(sampling) * ranks)
        yield self._turns(generator, sampling=sampling, policy=policy)

    def _turns(self, generator: Generator, *, sampling: list[SamplingParams], policy: RolloutPolicy) -> TurnDraws:
        """sampling: one per row."""

        def draw(samples: Samples, limits: Tensor) -> None:
            rows, lengths = limits.nonzero().squeeze(1).tolist(), samples.lengths.tolist()
            prompts = [samples.tokens[row, : lengths[row]].tolist() for row in rows]
            own = [replace(sampling[row], max_tokens=int(limits[row])) for row in rows]
            write_answers(self._drawn(generator, prompts=prompts, sampling=own), samples=samples, rows=rows)
            _keep_experts(samples, policy=policy, generator=generator)

        comm = self._comm
        go_on = bool if comm is None else lambda flag: any(comm.gather_objects(flag))
        return TurnDraws(draw=draw, go_on=go_on)

    def _drawn(
        self, generator: Generator, *, prompts: list[list[int]], sampling: list[SamplingParams]
    ) -> list[Completion]:
        """Returns this rank's answers.

        Among ranks that share a copy, the first generates for all, in their order, and the others compute with it.
        """
        if self._comm is None:
            return _answers(generator, prompts=prompts, sampling=sampling)
        asked = self._comm.gather_objects((prompts, sampling))
        found = None
        if generator.follows:
            generator.follow()
        else:
            every = [
                (prompt, one) for prompts, sampling in asked for prompt, one in zip(prompts, sampling, strict=True)
            ]
            found = _answers(generator, prompts=[prompt for prompt, _ in every], sampling=[one for _, one in every])
            generator.dismiss()
        answers = self._comm.gather_objects(found)[0]
        first = sum(len(prompts) for prompts, _ in asked[: self._comm.rank])
        return answers[first : first + len(prompts)]

    def _loaded(self, policy: RolloutPolicy, *, sequences: int) -> Generator:
        """Returns a generator with current weights. sequences: number in a rollout, over the ranks that share the copy."""
        steps = self._source.engine.global_steps
        if self._generator is None:
            count = min(_MOST, sequences)
            options = InferencePolicy(max_sequences=count, max_model_len=policy.length)
            self._generator = Generator(self._source, policy=options, comm=self._comm)
        elif self._step != steps:
            self._generator.load(self._source)
        self._step = steps
        return self._generator


class Merged:
    """An engine as a source of weights for the generator: its module, and full parameters with adapters merged into the weights."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.module: nn.Module = engine.module
        self.zero = self

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields full parameters. A collective call."""
        return merged_parameters(self.module, read=self.engine.zero.full_parameters)


@contextmanager
def _opened(engine: Engine, *, length: int, sequences: int) -> Iterator[Generator]:
    """Opens a generator with kernels and the engine's own parameters, for `sequences` texts of up to `length` tokens.

    A collective call.
    """
    options = InferencePolicy(
        max_sequences=min(_MOST_ON_DEVICE, sequences),
        max_step_tokens=_STEP_TOKENS,
        max_model_len=length,
        device=str(engine.process.device),
        kernels=True,
    )
    with engine.evaluating(), engine.zero.gathered():
        state = dict(Merged(engine).full_parameters())
        generator = Generator(UnreadModel(module=engine.module, state=state), policy=options)
        try:
            yield generator
        finally:
            generator.close()


def sampling_of(policy: RolloutPolicy, *, keys: Tensor, as_trainer: bool) -> list[SamplingParams]:
    """Returns the sampling of each answer. keys: keys of their random numbers. as_trainer: draws from the trainer's fp32 probabilities, as is
    always done over kept tokens.
    """
    common = SamplingParams(
        max_tokens=policy.max_tokens,
        temperature=policy.temperature,
        top_k=policy.cut.top_k,
        top_p=policy.cut.top_p,
        min_p=policy.cut.min_p,
        stop_token_ids=policy.stops,
        seed=policy.seed,
        fp32_logprobs=as_trainer or not policy.cut.keeps_all,
    )
    return [replace(common, draw_key=key) for key in keys.tolist()]


def _answers(generator: Generator, *, prompts: list[list[int]], sampling: list[SamplingParams]) -> list[Completion]:
    return [completion for (completion,) in generator.generate(prompts, sampling=sampling)]


def _keep_experts(samples: Samples, *, policy: RolloutPolicy, generator: Generator) -> None:
    if policy.keeps_experts:
        samples.experts = experts_of(samples, generator=generator)


def write_answers(answers: Sequence[Completion], *, samples: Samples, rows: Sequence[int]) -> None:
    """Appends the answers to these rows of the samples."""
    entries, lengths = list[Entries](), samples.lengths.tolist()
    for row, completion in zip(rows, answers, strict=True):
        first, count = lengths[row], len(completion.tokens)
        samples.answer_lengths[row] += count
        samples.finished[row] = completion.finish_reason == "stop"
        places = slice(first, first + count)
        samples.tokens[row, places] = torch.tensor(completion.tokens, dtype=torch.int64)
        samples.logprobs[row, places] = completion.processed_logprobs
        if completion.finish_reason == "error":
            samples.logprobs[row, first] = math.nan
        for number, kept in enumerate(completion.kept or []):
            ids = kept.long()
            entries.append((torch.full_like(ids, row), torch.full_like(ids, first + number), ids))
    samples.keep(entries)
