"""`Generator`: answers from a model, many sequences at a time, each as if it were alone.

Parameters have the dtype that the trainer computes in.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ztk.inference.block_cache import BlockCache
from ztk.inference.block_model import BlockModel
from ztk.inference.block_opening import block_cache, open_blocks, placement_of
from ztk.inference.block_schedule import BlockScheduler
from ztk.inference.block_weights import collect_blocks
from ztk.inference.cache import Cache
from ztk.inference.describe import describe
from ztk.inference.model import InferenceModel
from ztk.inference.opening import Opened, from_packed, from_state, settled
from ztk.inference.packed import Packed
from ztk.inference.policy import Completion, InferencePolicy, Output, PromptLogprob, SamplingParams
from ztk.inference.probe import check_module, check_rows, product_key
from ztk.inference.sample import draw, likeliest
from ztk.inference.schedule import Scheduler, Sequence, Work
from ztk.inference.steps import Span
from ztk.inference.weights import collect
from ztk.nn import Decoder


class TrainingEngine(Protocol):
    """What the generator reads of a training engine: `ztk.Engine` has it."""

    @property
    def module(self) -> nn.Module:
        """The model."""
        ...

    @property
    def zero(self) -> "FullParameters":
        """Where its parameters are."""
        ...


class FullParameters(Protocol):
    """The parameters by name, in their full shapes, one after the other; a collective call."""

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A submitted prompt. `id` is in every `Output` of its answers."""

    id: int
    prompt: list[int]
    sampling: SamplingParams


class Generator:
    """Generates with the native decoder or a causal language model of transformers, on the CPU, in fp32 or with weights of 8 or 4 bits.

    plan: with `policy.offload`, what is done with the memory. model: a module, a training engine, whose weights are gathered (every rank
    calls it), or a folder of packed weights. Its linear layers are copied in the
    processor's own layout, so that what a training script changes later needs `load`; embeddings and norms in fp32 are shared. A
    sequence's tokens and log-probabilities depend on the sequence, the weights and the seed alone.

    Raises:
        ValueError: a model that the engine does not compute, or a processor whose products differ by the number of rows.
    """

    def __init__(self, model: "nn.Module | TrainingEngine | Packed", *, policy: InferencePolicy | None = None) -> None:
        chosen = policy or InferencePolicy()
        opened = (
            from_packed(model, policy=chosen) if isinstance(model, Packed) else self._from_module(model, policy=chosen)
        )
        self._model, self.plan, self._streamed = opened.model, opened.plan, opened.streamed
        self._packed_bytes = opened.packed_bytes
        self.policy = settled(chosen, plan=self.plan)
        self._subject, self.description = opened.subject, opened.subject.description
        self._lone = frozenset() if isinstance(self._model, BlockModel) else check_rows(self._model)
        self._allow_lone_rows()
        self.max_len = min(self.policy.max_model_len or self.description.max_len, self.description.max_len)
        self._cache, self._scheduler = self._memory()
        self._sequences: dict[int, list[Sequence]] = {}  # by request
        self._ids = itertools.count()

    @staticmethod
    def _from_module(model: "nn.Module | TrainingEngine", *, policy: InferencePolicy) -> Opened:
        if isinstance(model, nn.Module):
            module, state = model, dict(model.named_parameters())
        else:
            module, state = model.module, _gathered(model)
        subject = describe(module)
        if isinstance(model, nn.Module) and not isinstance(model, Decoder):
            # In fp32, where a difference means that the engine misread the model, not that weights were rounded.
            check_module(InferenceModel(subject, weights=collect(state, description=subject.description)), module=model)
        placement = placement_of(policy, module=module)
        if placement is not None:
            model = open_blocks(state, subject=subject, placement=placement, policy=policy)
            return Opened(model=model, subject=subject)
        if policy.offload is not None:
            return from_state(state, subject=subject, policy=policy, offload=policy.offload)
        weights = collect(state, description=subject.description, kind=policy.weights)
        return Opened(model=InferenceModel(subject, weights=weights), subject=subject)

    # Complete answers

    def generate(
        self, prompts: list[list[int]], *, sampling: SamplingParams | list[SamplingParams] | None = None
    ) -> list[list[Completion]]:
        """`sampling.n` answers to each prompt of token ids, in the order of the prompts.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, or more tokens than the model takes.
        """
        each = sampling if isinstance(sampling, list) else [sampling or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} sampling parameters for {len(prompts)} prompts: pass one, or one per prompt")
        for prompt, one in zip(prompts, each, strict=True):
            self._check(prompt, limit=one.max_tokens)
        answers = [
            self._enqueue(prompt, sampling=one, limit=one.max_tokens) for prompt, one in zip(prompts, each, strict=True)
        ]
        self._finish(answers)
        return [[_completion(sequence) for sequence in sequences] for sequences in answers]

    def score(self, sequences: list[list[int]]) -> list[Tensor]:
        """The raw log-probability of every token given those before it: fp32 [len - 1] for each sequence.

        Raises:
            ValueError: an empty sequence, a token outside the vocabulary, or more tokens than the model takes.
            FloatingPointError: logits that are not finite.
        """
        return [_values(scores) for scores in self._scored(sequences, top=0)]

    def score_tokens(self, sequences: list[list[int]]) -> list[list[PromptLogprob]]:
        """As `score`, with the likeliest token of every position: [len - 1] for each sequence.

        Raises:
            ValueError: as `score` does.
            FloatingPointError: logits that are not finite.
        """
        return self._scored(sequences, top=1)

    def _scored(self, sequences: list[list[int]], *, top: int) -> list[list[PromptLogprob]]:
        sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=True, logprobs=top)
        for sequence in sequences:
            self._check(sequence, limit=0)
        computed = [self._enqueue(sequence, sampling=sampling, limit=0)[0] for sequence in sequences]
        self._finish([computed])
        for number, sequence in enumerate(computed):
            if sequence.error is not None:
                raise FloatingPointError(f"sequence {number}: {sequence.error}")
        return [sequence.prompt_logprobs for sequence in computed]

    def stream(self, prompt: list[int], *, sampling: SamplingParams | None = None) -> Iterator[Output]:
        """The tokens of one request as they are drawn. A caller who stops listening cancels the request."""
        request = self.submit(prompt, sampling=sampling or SamplingParams())
        try:
            while request.id in self._sequences:
                yield from (output for output in self.step() if output.request_id == request.id)
        finally:
            self.cancel(request.id)

    # Continuous batching

    def submit(self, prompt: list[int], *, sampling: SamplingParams) -> Request:
        """Queues a request; `step` computes it.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, or more tokens than the model takes.
        """
        self._check(prompt, limit=sampling.max_tokens)
        first = self._enqueue(prompt, sampling=sampling, limit=sampling.max_tokens)[0]
        return Request(id=first.request_id, prompt=list(prompt), sampling=sampling)

    @property
    def has_work(self) -> bool:
        """A request is not answered yet."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    def is_open(self, request_id: int) -> bool:
        """The request has answers that have not ended."""
        return request_id in self._sequences

    @property
    def preempted(self) -> int:
        """Times so far that a sequence's blocks were copied to main memory, because others needed the room."""
        return self._scheduler.preempted if isinstance(self._scheduler, BlockScheduler) else 0

    @property
    def reused_tokens(self) -> int:
        """Tokens of prompts so far whose keys and values were another sequence's."""
        return self._scheduler.reused_tokens

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Computes one step of all sequences that have room in it, and returns the tokens drawn."""
        works = self._scheduler.plan()
        if not works:
            return []
        tokens, spans = [], []
        for work in works:
            spans.append(Span(slot=work.sequence.slot, start=work.start, length=len(work.tokens), row=len(tokens)))
            tokens += work.tokens
        x = self._model.forward(torch.tensor(tokens), spans=spans, cache=self._cache)
        needed = [self._rows_with_logits(work) for work in works]
        rows = [span.row + row for span, own in zip(spans, needed, strict=True) for row in own]
        logits = self._model.logits(x[rows]).cpu() if rows else torch.empty(0, self.description.vocab_size)
        parts = logits.split([len(own) for own in needed])
        return [
            output
            for work, own, part in zip(works, needed, parts, strict=True)
            for output in self._take(work, rows=own, logits=part)
        ]

    def cancel(self, request_id: int) -> None:
        """Ends a request and frees its slots. Unknown and ended ones are ignored."""
        for sequence in self._sequences.pop(request_id, []):
            if sequence.finish_reason is None:
                self._scheduler.finish(sequence, reason="cancelled")

    def load(self, engine: TrainingEngine) -> None:
        """Takes the weights of a training engine of the same model, at any stage, without a disk. Every rank of the engine calls it.

        Raises:
            RuntimeError: requests are not answered yet, or layers are streamed.
            ValueError: the engine lacks a parameter of this model.
        """
        if self._streamed is not None:
            raise RuntimeError(
                "load: the weights are read from a packed folder; build a Generator of the engine without offload"
            )
        if self.has_work:
            raise RuntimeError("load: requests are not answered yet; let them end, or cancel() them")
        state = _gathered(engine)
        if isinstance(self._model, BlockModel):
            placement = self._model.weights.placement
            weights = collect_blocks(state, description=self.description, placement=placement)
            self._model = BlockModel(self._subject, weights=weights, exact=self.policy.exact)
        else:
            weights = collect(state, description=self.description, kind=self.policy.weights)
            self._model = InferenceModel(self._subject, weights=weights)
            self._allow_lone_rows()
        self._scheduler.forget()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the linear layers and the head, scales included; of a packed folder those of its layers and the head."""
        if self._packed_bytes is not None:
            return self._packed_bytes
        if isinstance(self._model, BlockModel):
            return self._model.nbytes
        return sum(product.nbytes for product in self._model.weights.products())

    @property
    def streamed_bytes(self) -> int:
        """Bytes of layers that were read so far, those that were read ahead included."""
        if self._streamed is None:
            return 0
        self._streamed.settle()
        return self._streamed.counters.read_bytes

    def close(self) -> None:
        """Ends the threads that read layers. The generator computes nothing afterwards. Idempotent."""
        if self._streamed is not None:
            self._streamed.close()

    def forget_prefixes(self) -> None:
        """Later prompts are computed from their first token."""
        self._scheduler.forget()

    # Parts

    def _memory(self) -> tuple[Cache | BlockCache, Scheduler]:
        """The cache of all sequences, and who shares it."""
        slots = self.policy.max_sequences
        if isinstance(self._model, BlockModel):
            cache = block_cache(self._model, policy=self.policy, slots=slots, positions=self.max_len)
            return cache, BlockScheduler(self.policy, cache=cache)
        cache = Cache(self.description, slots=slots)
        return cache, Scheduler(self.policy, cache=cache)

    def _scratch(self, positions: int) -> Cache | BlockCache:
        """A cache for one sequence."""
        if isinstance(self._model, BlockModel):
            return block_cache(self._model, policy=self.policy, slots=1, positions=positions, is_scratch=True)
        cache = Cache(self.description, slots=1)
        cache.reserve(positions)
        return cache

    def _allow_lone_rows(self) -> None:
        if isinstance(self._model, BlockModel):
            return  # its kernels have one path for every number of rows
        for product in self._model.weights.products():
            product.doubles = product_key(product) not in self._lone

    def _check(self, prompt: list[int], *, limit: int) -> None:
        if not prompt:
            raise ValueError("the prompt is empty: begin with the model's first token, or a newline")
        odd = next((token for token in prompt if not 0 <= token < self.description.vocab_size), None)
        if odd is not None:
            raise ValueError(f"token {odd} is outside the vocabulary of {self.description.vocab_size}")
        if len(prompt) + limit > self.max_len:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and an answer of up to {limit} are more than the {self.max_len} tokens of this model: "
                "shorten the prompt or lower max_tokens"
            )

    def _enqueue(self, prompt: list[int], *, sampling: SamplingParams, limit: int) -> list[Sequence]:
        number = next(self._ids)
        sequences = [
            Sequence(
                request_id=number,
                sample=sample,
                sampling=sampling,
                tokens=list(prompt),
                prompt_length=len(prompt),
                limit=limit,
            )
            for sample in range(sampling.n)
        ]
        self._sequences[number] = sequences
        self._scheduler.waiting.extend(sequences)
        return sequences

    def _finish(self, answers: list[list[Sequence]]) -> None:
        """Steps until all have ended. If a step fails, none of them stays in the queue."""
        everything = [sequence for sequences in answers for sequence in sequences]
        try:
            while any(sequence.finish_reason is None for sequence in everything):
                self.step()
        finally:
            for sequence in everything:
                self.cancel(sequence.request_id)

    def _rows_with_logits(self, work: Work) -> list[int]:
        """Rows of the work whose next token is drawn or scored."""
        sequence, stop = work.sequence, work.start + len(work.tokens)
        if work.drafts:
            return list(range(len(work.tokens)))
        if sequence.sampling.prompt_logprobs and work.start < sequence.prompt_length:
            return list(range(len(work.tokens)))
        return [len(work.tokens) - 1] if stop == len(sequence.tokens) else []

    def _take(self, work: Work, *, rows: list[int], logits: Tensor) -> Iterator[Output]:
        """Draws from the rows of one work: each draft counts while it is the token that is drawn."""
        sequence = work.sequence
        if not logits.isfinite().all():
            yield self._broken(sequence)
            return
        self._scheduler.advance(
            sequence, computed=min(work.start + len(work.tokens) - work.drafts, len(sequence.tokens))
        )
        for row, line in zip(rows, logits, strict=True):
            position = work.start + row
            if position + 1 < sequence.prompt_length:
                raw = torch.log_softmax(line.double(), -1)
                top = likeliest(raw, count=sequence.sampling.logprobs) if sequence.sampling.logprobs else {}
                sequence.prompt_logprobs.append(PromptLogprob(float(raw[sequence.tokens[position + 1]]), top))
                continue
            if sequence.limit == 0:
                self._scheduler.finish(sequence, reason="length")
                self._forget_if_done(sequence.request_id)
                return
            is_first = len(sequence.tokens) == sequence.prompt_length
            drawn = draw(
                line,
                sampling=sequence.sampling,
                prompt=sequence.tokens[: sequence.prompt_length],
                answer=sequence.answer,
                sample=sequence.sample,
            )
            sequence.tokens.append(drawn.token)
            sequence.logprobs.append(drawn.logprob)
            sequence.processed.append(drawn.processed_logprob)
            if drawn.top is not None:
                sequence.tops.append(drawn.top)
            reason = self._reason_to_stop(sequence)
            if reason is not None:
                self._scheduler.finish(sequence, reason=reason)
            yield Output(
                request_id=sequence.request_id,
                sample=sequence.sample,
                token=drawn.token,
                logprob=drawn.logprob,
                finish_reason=reason,
                top_logprobs=drawn.top,
                prompt_logprobs=sequence.prompt_logprobs if is_first and sequence.sampling.prompt_logprobs else None,
            )
            if reason is not None or row + 1 >= len(work.tokens) or work.tokens[row + 1] != drawn.token:
                break
            self._scheduler.advance(sequence, computed=position + 2)  # the draft's keys are those of this token
        if sequence.finish_reason is not None:
            self._forget_if_done(sequence.request_id)

    def _reason_to_stop(self, sequence: Sequence) -> str | None:
        if sequence.tokens[-1] in sequence.sampling.stop_token_ids:
            return "stop"
        return "length" if len(sequence.answer) >= sequence.limit else None

    def _broken(self, sequence: Sequence) -> Output:
        """Ends a sequence whose logits are not finite. The layer is found by computing it once more, alone."""
        found: list[int] = []
        scratch = self._scratch(len(sequence.tokens))
        span = Span(slot=0, start=0, length=len(sequence.tokens), row=0)
        self._model.forward(torch.tensor(sequence.tokens), spans=[span], cache=scratch, broken=found)
        place = f"after layer {found[0]} of {self.description.layers}" if found else "in the head"
        error = f"the logits are not finite, first {place}: check the weights (NaN or inf in them, or an overflow of the stored dtype)"
        self._scheduler.finish(sequence, reason="error", error=error)
        self._forget_if_done(sequence.request_id)
        return Output(
            request_id=sequence.request_id,
            sample=sequence.sample,
            token=None,
            logprob=float("nan"),
            finish_reason="error",
            error=error,
        )

    def _forget_if_done(self, number: int) -> None:
        """Requests are dropped when all answers have ended; who waits for them has their sequences."""
        if all(sequence.finish_reason is not None for sequence in self._sequences.get(number, [])):
            self._sequences.pop(number, None)


def _gathered(engine: TrainingEngine) -> dict[str, Tensor]:
    """Copies, fp32 on the CPU."""
    return {name: value.detach().to("cpu", torch.float32, copy=True) for name, value in engine.zero.full_parameters()}


def _values(logprobs: list[PromptLogprob]) -> Tensor:
    return torch.tensor([item.value for item in logprobs], dtype=torch.float32)


def _completion(sequence: Sequence) -> Completion:
    asked = sequence.sampling
    return Completion(
        tokens=sequence.answer,
        logprobs=torch.tensor(sequence.logprobs, dtype=torch.float32),
        processed_logprobs=torch.tensor(sequence.processed, dtype=torch.float32),
        finish_reason=sequence.finish_reason or "error",
        top_logprobs=sequence.tops if asked.logprobs else None,
        prompt_logprobs=_values(sequence.prompt_logprobs) if asked.prompt_logprobs else None,
        error=sequence.error,
    )
