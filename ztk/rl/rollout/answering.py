"""Generates answers with a model in memory, in step: each forward computes one token of every unfinished answer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.inference.answer_cache import AnswerCache
from ztk.inference.answer_step import AnswerStep
from ztk.inference.attention import BLOCK
from ztk.inference.describe import Description
from ztk.inference.equal_shapes import EqualShapes, equal_shapes
from ztk.inference.kept import KEEPS_ALL, Cut
from ztk.inference.model import InferenceModel
from ztk.inference.plan import free_memory
from ztk.inference.sample import choose, fp32_logprobs
from ztk.inference.slab_cache import SlabCache
from ztk.inference.steps import Span
from ztk.rl.rollout.kept import entries_of

MOST = 64  # answers at a time
# (logits [A, V], tokens int64 [A]) -> their log-probabilities, float32 [A]
Chosen = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """Parameters of sampling.

    max_tokens: per answer. stops: tokens that end an answer. draws: a number in [0, 1) for each answer and token, float64 [A,
    max_tokens]. in_double: compares them with probabilities in double precision, as `ztk.inference.sample` does. chosen: computes the
    stored log-probabilities, `fp32_logprobs` by default. cut: restricts sampling and log-probabilities to the kept tokens.
    """

    max_tokens: int
    stops: tuple[int, ...]
    temperature: float
    draws: Tensor
    in_double: bool = False
    chosen: Chosen | None = None
    cut: Cut = KEEPS_ALL


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """tokens: int64 [A, max_tokens], zeros after each answer's end. logprobs: float32 of the same shape, NaN for NaN logits. counts:
    tokens of each, int64 [A]. finished: whether the answer ended by itself, bool [A]. kept: entries for `Kept.of`.
    """

    tokens: Tensor
    logprobs: Tensor
    counts: Tensor
    finished: Tensor
    kept: list[tuple[Tensor, Tensor, Tensor]]


def can_answer(model: InferenceModel) -> bool:
    """Returns whether `answer` is bitwise equal to the model's other forwards on this processor, if one process has the model."""
    of = model.description
    return model.ranks is None and _shapes(of).rows_for(of.heads // of.kv_heads) is not None


def answers_at_once(model: InferenceModel, *, tokens: int, ranks: int) -> int:
    """Returns the number of answers of up to `tokens` tokens, including prompts, to generate at a time.

    At most `MOST`, and at least one; keys and values must fit into half of the free memory. ranks: sharing the machine.
    """
    of = model.description
    each = 8 * of.layers * of.kv_heads * of.head_dim * -(-tokens // BLOCK) * BLOCK
    return max(1, min(MOST, free_memory() // (2 * ranks * each)))


@torch.inference_mode()
def answer(model: InferenceModel, *, prompts: list[tuple[int, ...]], drawing: Drawing) -> Answered:
    """Generates one answer to each prompt of token ids, with a model for which `can_answer` is true.

    Equal prompts are computed once. Answers do not depend on each other.
    """
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    prompt_of = [numbers[prompt] for prompt in prompts]
    logits, cache = _begun(model, prompts=list(numbers), prompt_of=prompt_of, longest=drawing.max_tokens)
    step = AnswerStep(
        cache, description=model.description, shapes=_shapes(model.description), lengths=[len(one) for one in prompts]
    )
    count = len(prompts)
    tokens = torch.zeros(drawing.max_tokens, count, dtype=torch.int64)
    logprobs = torch.zeros(drawing.max_tokens, count)
    counts, finished = torch.full((count,), drawing.max_tokens), torch.zeros(count, dtype=torch.bool)
    live, draws = torch.arange(count), drawing.draws.t().contiguous()
    stops, entries = torch.tensor(drawing.stops), []
    for index in range(drawing.max_tokens):
        if not drawing.cut.keeps_all:
            logits, kept = drawing.cut.hide(logits, temperature=drawing.temperature)
            entries.append(entries_of(kept, rows=live, positions=torch.full_like(live, index)))
        drawn, found = _drawn(logits, drawing=drawing, uniforms=draws[index])
        if len(live) == count:
            tokens[index], logprobs[index] = drawn, found
        else:
            tokens[index, live], logprobs[index, live] = drawn, found
        ends = torch.isin(drawn, stops)
        if ends.any():
            finished[live[ends]], counts[live[ends]] = True, index + 1
            places = _places(ends.tolist())
            if not places:
                break
            live, draws, drawn = live[places], draws[:, places], drawn[places]
            step.keep(places)
        if index + 1 < drawing.max_tokens:
            logits = model.next_logits(drawn, step=step)
            step.next()
    return Answered(tokens=tokens.t(), logprobs=logprobs.t(), counts=counts, finished=finished, kept=entries)


@torch.inference_mode()
def given_answer(model: InferenceModel, *, prompt: tuple[int, ...], answer: list[int], copies: int) -> Tensor:
    """Returns logits after a prompt and after each token of an answer, for `copies` equal answers in step: fp32 [len(answer) + 1, copies,
    V].
    """
    logits, cache = _begun(model, prompts=[prompt], prompt_of=[0] * copies, longest=len(answer))
    of, found = model.description, [logits]
    step = AnswerStep(cache, description=of, shapes=_shapes(of), lengths=[len(prompt)] * copies)
    for number, token in enumerate(answer):
        if number:
            step.next()
        found.append(model.next_logits(torch.tensor([token] * copies), step=step))
    return torch.stack(found)


def _shapes(of: Description) -> EqualShapes:
    return equal_shapes(of.heads // of.kv_heads, head_dim=of.head_dim)


def _begun(
    model: InferenceModel, *, prompts: list[tuple[int, ...]], prompt_of: list[int], longest: int
) -> tuple[Tensor, AnswerCache]:
    """Returns the logits after each answer's prompt, fp32 [A, V], and the cache. prompt_of: index of each answer's prompt."""
    of, lengths = model.description, [len(prompt) for prompt in prompts]
    cache = SlabCache(of, slots=len(prompts))
    cache.reserve(max(lengths))
    spans, flat = [], []
    for slot, prompt in enumerate(prompts):
        spans.append(Span(slot=slot, start=0, length=len(prompt), row=len(flat)))
        flat += prompt
    last = [span.row + span.length - 1 for span in spans]
    logits = model.own_logits(torch.tensor(flat), spans=spans, cache=cache, rows=last)
    most = max(prompt_of.count(number) for number in range(len(prompts)))
    shares = _shapes(of).rows_for(most * (of.heads // of.kv_heads)) is not None
    answers = AnswerCache(cache, lengths=lengths, prompt_of=prompt_of, longest=longest, shares=shares)
    return logits[prompt_of], answers


def _drawn(logits: Tensor, *, drawing: Drawing, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Samples a token for each row of logits [A, V]: int64 [A], and its log-probability."""
    distribution = fp32_logprobs(logits, temperature=drawing.temperature)
    drawn = choose(
        torch.log_softmax(logits.double() / drawing.temperature, dim=-1) if drawing.in_double else distribution,
        uniforms=uniforms,
    )
    if drawing.chosen is not None:
        return drawn, drawing.chosen(logits, drawn)
    return drawn, distribution.gather(1, drawn.unsqueeze(1)).squeeze(1)


def _places(ends: list[bool]) -> list[int]:
    """Returns the sources of the first places: unfinished answers stay, and the last of them take the places of finished ones."""
    left = ends.count(False)
    behind = [place for place in range(left, len(ends)) if not ends[place]]
    return [behind.pop() if ends[place] else place for place in range(left)]
