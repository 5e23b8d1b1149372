"""Generates answers with a model in memory, in step: each forward computes one token of every unfinished answer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.inference.answer_step import AnswerCache, AnswerStep, EqualShapes, equal_shapes
from ztk.inference.cache_attention import BLOCK
from ztk.inference.capacity import free_memory
from ztk.inference.describe import Description
from ztk.inference.model import InferenceModel
from ztk.inference.sample import KEEPS_ALL, Cut, choose, fp32_logprobs
from ztk.inference.slab_cache import SlabCache
from ztk.inference.steps import Span
from ztk.rl.rollout.buffer import Samples
from ztk.rl.rollout.kept import Entries, entries_of
from ztk.rl.rollout.weights import RolloutWeights

MOST = 64  # answers at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutPolicy:
    """length: tokens of a row (prompt, answer and padding), as in training. micro_batch: texts per forward, as in training. packs:
    forwards take texts without padding; see `ztk.rl.rollout.layout`. The result is bitwise independent of the pack only if the engine's
    module supports it.

    max_tokens: of an answer. stops, pad: token numbers; an answer ends with one of `stops`. temperature: divides the logits, for sampling
    and for log-probabilities. cut: restricts sampling and log-probabilities to the kept tokens. keeps_experts: the inference engine keeps
    the experts of each token.

    Raises:
        ValueError: a number out of its range.
    """

    length: int
    micro_batch: int
    max_tokens: int
    stops: tuple[int, ...]
    pad: int
    temperature: float = 1.0
    seed: int = 0
    weights: RolloutWeights = RolloutWeights.whole
    packs: bool = False
    cut: Cut = KEEPS_ALL
    keeps_experts: bool = False

    def __post_init__(self) -> None:
        for name in ("length", "micro_batch", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollout {name}={getattr(self, name)}: must be 1 or more")
        if not self.temperature > 0:
            raise ValueError(f"rollout.temperature={self.temperature}: must be above 0; a policy gradient needs draws")


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


def answer(model: InferenceModel, *, policy: RolloutPolicy, samples: Samples, draws: Tensor) -> list[Entries]:
    """Appends an answer to each of the samples, which have only their prompts, in place, with a model for which `can_answer` is true.

    Equal prompts are computed once. Answers do not depend on each other. Returns the tokens that the cut kept.

    draws: a number in [0, 1) for each answer and token, float64 [S, max_tokens].
    """
    tokens, lengths, counts, finished = samples.tokens, samples.prompt_lengths, samples.answer_lengths, samples.finished
    counts[:] = policy.max_tokens
    prompts = [tuple(row[:length]) for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    prompt_of = [numbers[prompt] for prompt in prompts]
    with torch.inference_mode():
        logits, cache = _begun(model, prompts=list(numbers), prompt_of=prompt_of, longest=policy.max_tokens)
        step = AnswerStep(
            cache, description=model.description, shapes=_shapes(model.description), lengths=lengths.tolist()
        )
        count = len(prompts)
        answers = torch.zeros(policy.max_tokens, count, dtype=torch.int64)
        values = torch.zeros(policy.max_tokens, count)
        live, places = torch.arange(count), draws.t().contiguous()
        stops, entries = torch.tensor(policy.stops), list[Entries]()
        for index in range(policy.max_tokens):
            if not policy.cut.keeps_all:
                logits, kept = policy.cut.hide(logits, temperature=policy.temperature)
                entries.append(entries_of(kept, rows=live, positions=lengths[live] + index))
            distribution = fp32_logprobs(logits, temperature=policy.temperature)
            drawn = choose(distribution, uniforms=places[index])
            found = distribution.gather(1, drawn.unsqueeze(1)).squeeze(1)
            if len(live) == count:
                answers[index], values[index] = drawn, found
            else:
                answers[index, live], values[index, live] = drawn, found
            ends = torch.isin(drawn, stops)
            if ends.any():
                finished[live[ends]], counts[live[ends]] = True, index + 1
                going = _places(ends.tolist())
                if not going:
                    break
                live, places, drawn = live[going], places[:, going], drawn[going]
                step.keep(going)
            if index + 1 < policy.max_tokens:
                logits = model.next_logits(drawn, step=step)
                step.next()
    row, index = (torch.arange(policy.max_tokens) < counts.unsqueeze(1)).nonzero().unbind(1)
    at = lengths[row] + index
    tokens[row, at], samples.logprobs[row, at] = answers[index, row], values[index, row]
    return entries


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


def _places(ends: list[bool]) -> list[int]:
    """Returns the sources of the first places: unfinished answers stay, and the last of them take the places of finished ones."""
    left = ends.count(False)
    behind = [place for place in range(left, len(ends)) if not ends[place]]
    return [behind.pop() if ends[place] else place for place in range(left)]
