"""Generates samples with the engine in training, at any stage and tier: without a second model or a copy of the weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ztk.inference.attention import BLOCK
from ztk.inference.plan import free_memory
from ztk.inference.sample import choose, fp32_logprobs
from ztk.nn import Decoder
from ztk.rl.rollout.answering import MOST, Part, RolloutPolicy, answer, answers_at_once, joined
from ztk.rl.rollout.attention import TextCache
from ztk.rl.rollout.buffer import Samples
from ztk.rl.rollout.draws import sample_keys, uniforms
from ztk.rl.rollout.head import Answers, large_answers
from ztk.rl.rollout.kept import Kept, entries_of
from ztk.rl.rollout.layout import Layout, has_cache, lay_out, lay_out_new, new_tokens
from ztk.rl.rollout.packed import pack_weights
from ztk.rl.rollout.weights import rollout_weights
from ztk.train.engine import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """The samples that this rank generates, S of them. prompts: their tokens. numbers: of the samples in the step over all ranks, int64
    [S].

    prompt_numbers: of their prompts in the run. copies: index among the prompt's samples. int64 [S] each.
    """

    prompts: Sequence[Sequence[int]]
    numbers: Tensor
    prompt_numbers: Tensor
    copies: Tensor


def generate(engine: Engine, *, policy: RolloutPolicy, requests: Requests, step: int) -> Samples:
    """Generates an answer to every prompt, with rewards of 0 and all samples included.

    A collective call with the same number of samples on every rank.

    The forward is the trainer's, over rows of the trainer's shape or over packed texts; see [Note: The trainer's bits] in `equality`.
    Packed forwards omit finished texts, and with `CachedAttention` also the tokens of earlier forwards.

    Raises:
        ValueError: a prompt that leaves no room for the answer, or a number of samples that is not a multiple of the micro-batch.
        FloatingPointError: logits are not finite.
    """
    tokens, lengths = first_tokens(policy, requests=requests)
    size, parts = _together(engine, policy=policy, count=len(lengths)), []
    keys = sample_keys(seed=policy.seed, step=step, prompts=requests.prompt_numbers, samples=requests.copies)
    draws = _draws(policy, keys=keys, lengths=lengths)
    with rollout_weights(engine, weights=policy.weights):
        packed = pack_weights(engine) if policy.packs else None
        if packed is not None:
            size = answers_at_once(packed, tokens=policy.length, ranks=engine.process.local_world_size)
        for first in range(0, len(lengths), size):
            rows = slice(first, first + size)
            given = {"tokens": tokens[rows], "lengths": lengths[rows], "draws": draws[rows]}
            if packed is None:
                forwards = _Forwards(engine, policy=policy, texts=len(tokens[rows]))
                limits = torch.full_like(lengths[rows], policy.max_tokens)
                parts.append(_answer(engine, policy=policy, forwards=forwards, limits=limits, **given))
            else:
                large = large_answers(engine, rows=len(tokens[rows]), length=tokens.shape[1])
                parts.append(answer(packed, policy=policy, large=large, **given))
    return samples_of(parts, tokens=tokens, lengths=lengths, requests=requests)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnDraws:
    """Samples answers turn by turn. A collective object: ranks whose forwards depend on each other make the same calls.

    draw: appends the next turn of all rows to tokens int64 [S, T] with texts of lengths int64 [S]. limits int64 [S]: most tokens of this
    turn, 0 for a row that has ended. go_on: whether any rank has rows left, given whether this one has.
    """

    draw: Callable[[Tensor, Tensor, Tensor], "Part"]
    go_on: Callable[[bool], bool]


@contextmanager
def drawn_turns(engine: Engine, *, policy: RolloutPolicy, requests: Requests, step: int) -> Iterator[TurnDraws]:
    """Samples turn by turn with the trainer's forward. If it has a cache, keys and values are kept between turns, for as many texts as fit into
    half of the free memory. Every rank must enter it, and make the same number of calls.

    Raises:
        ValueError: as `generate` does.
    """
    count = len(requests.prompts)
    size = _together(engine, policy=policy, count=count)
    keys = sample_keys(seed=policy.seed, step=step, prompts=requests.prompt_numbers, samples=requests.copies)
    groups = [slice(first, min(first + size, count)) for first in range(0, count, size)]
    kept: dict[int, _Forwards] = {}
    most = _groups_kept(engine, policy=policy, size=size)

    def draw(tokens: Tensor, lengths: Tensor, limits: Tensor) -> Part:
        draws, parts = _draws(policy, keys=keys, lengths=lengths), []
        for rows in groups:
            if any_rank(engine, flag=bool(limits[rows].any())):
                forwards = kept.get(rows.start) or _Forwards(engine, policy=policy, texts=rows.stop - rows.start)
                if len(kept) < most:
                    kept[rows.start] = forwards
                given = {"tokens": tokens[rows], "lengths": lengths[rows], "limits": limits[rows], "draws": draws[rows]}
                parts.append(_answer(engine, policy=policy, forwards=forwards, **given))
            else:
                parts.append(_no_answers(tokens[rows]))
        return joined(parts)

    with rollout_weights(engine, weights=policy.weights):
        yield TurnDraws(draw=draw, go_on=lambda flag: any_rank(engine, flag=flag))


def _together(engine: Engine, *, policy: RolloutPolicy, count: int) -> int:
    """Returns the number of texts per forward. Raises ValueError for a number of texts that does not fit the trainer's forwards."""
    if count % policy.micro_batch:
        raise ValueError(
            f"{count} samples of a rank are no multiple of train.micro_batch_size={policy.micro_batch}: the rollout's forwards "
            "have the trainer's shape"
        )
    # One token per text and forward:
    return max(policy.micro_batch, MOST) if policy.packs and has_cache(engine.module) else policy.micro_batch


def _groups_kept(engine: Engine, *, policy: RolloutPolicy, size: int) -> int:
    """How many groups of `size` texts keep their forwards, whose caches take half of the free memory at most."""
    if not (policy.packs and has_cache(engine.module)):
        return 0
    of, blocks = cast(Decoder, engine.module).config, -(-policy.length // BLOCK)
    each = 8 * of.layers * of.kv_heads * of.head_dim * blocks * BLOCK
    return free_memory() // (2 * engine.process.local_world_size * each * (size + 1))


def _draws(policy: RolloutPolicy, *, keys: Tensor, lengths: Tensor) -> Tensor:
    """Returns the random numbers for the tokens after texts of `lengths`, int64 [S]: float64 [S, max_tokens]."""
    return uniforms(keys.unsqueeze(1), positions=lengths.unsqueeze(1) + torch.arange(policy.max_tokens))


def _no_answers(tokens: Tensor) -> Part:
    """Returns the part of rows that have ended, tokens [S, T]."""
    counts = torch.zeros(len(tokens), dtype=torch.int64)
    return Part(counts, torch.zeros(tokens.shape), counts.bool(), None)


def samples_of(parts: Sequence[Part], *, tokens: Tensor, lengths: Tensor, requests: Requests) -> Samples:
    """Makes samples from tokens int64 [S, T] with answers after prompts of `lengths`. parts: results of `answer` for consecutive rows.

    Raises:
        FloatingPointError: a log-probability is not finite.
    """
    counts, logprobs, finished, kept = joined(parts)
    check_finite(logprobs, requests=requests)
    return Samples(
        tokens=tokens,
        numbers=requests.numbers,
        prompts=requests.prompt_numbers,
        prompt_lengths=lengths,
        answer_lengths=counts,
        finished=finished,
        logprobs=logprobs,
        rewards=torch.zeros(len(lengths), dtype=torch.float64),
        included=torch.ones(len(lengths), dtype=torch.bool),
        kept=kept,
    )


def check_finite(logprobs: Tensor, *, requests: Requests) -> None:
    """Raises FloatingPointError for a log-probability [S, T] that is not finite."""
    if not logprobs.isfinite().all():
        row = int((~logprobs.isfinite()).any(1).nonzero()[0])
        raise FloatingPointError(f"sample {int(requests.numbers[row])}: the policy's logits are not finite")


def first_tokens(policy: RolloutPolicy, *, requests: Requests) -> tuple[Tensor, Tensor]:
    """Returns rows that begin with the prompts, int64 [S, T], and the prompts' lengths, int64 [S].

    Raises ValueError for a prompt without a token, and for one that leaves no room for the answer.
    """
    lengths = torch.tensor([len(prompt) for prompt in requests.prompts])
    if (longest := int(lengths.max())) + policy.max_tokens > policy.length:
        raise ValueError(
            f"a prompt of {longest} tokens and rollout.max_tokens={policy.max_tokens} do not fit into data.seq_len={policy.length}: use "
            f"data.seq_len={longest + policy.max_tokens}"
        )
    if int(lengths.min()) < 1:
        raise ValueError("a prompt has no token: an answer needs something to follow")
    tokens = torch.full((len(lengths), policy.length), policy.pad, dtype=torch.int64)
    for row, prompt in zip(tokens, requests.prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
    return tokens, lengths


def _answer(
    engine: Engine,
    *,
    policy: RolloutPolicy,
    forwards: "_Forwards",
    tokens: Tensor,
    lengths: Tensor,
    limits: Tensor,
    draws: Tensor,
) -> Part:
    """Same as `answer`, with the engine's module. forwards: of these texts. limits: the most tokens of each answer, int64 [S]."""
    logprobs = torch.zeros(tokens.shape, dtype=torch.float32)
    counts, active = torch.zeros_like(lengths), limits > 0
    finished = torch.zeros_like(active)
    large = large_answers(engine, rows=len(tokens), length=tokens.shape[1])
    stops, entries = torch.tensor(policy.stops), []
    for index in range(policy.max_tokens):
        rows = _computed(active) if policy.packs else torch.arange(len(tokens))
        positions = (lengths + counts)[rows]  # of the tokens sampled now
        logits, goes_on = forwards.logits(tokens, rows=rows, lengths=positions, large=large), active[rows]
        if not policy.cut.keeps_all:
            logits, kept = policy.cut.hide(logits, temperature=policy.temperature)
            own = kept[goes_on.to(kept.device)].cpu()
            entries.append(entries_of(own, rows=rows[goes_on], positions=positions[goes_on]))
        distribution = fp32_logprobs(logits, temperature=policy.temperature).cpu()
        drawn = choose(distribution, uniforms=draws[rows, index])
        if large is None:
            chosen = distribution.gather(1, drawn.unsqueeze(1)).squeeze(1)
        else:  # with the function that the update uses for chunks
            chosen = large.chosen(logits, tokens=drawn, temperature=policy.temperature)
        where = rows[goes_on], positions[goes_on]
        tokens[where], logprobs[where] = drawn[goes_on], chosen[goes_on]
        counts += active
        finished[rows] |= goes_on & torch.isin(drawn, stops)
        active &= ~finished & (counts < limits)
        if not any_rank(engine, flag=bool(active.any())):
            break
    kept = Kept.of(entries, shape=(len(tokens), tokens.shape[1])) if entries else None
    return Part(counts, logprobs, finished, kept)


class _Forwards:
    """The module's forwards of a micro-batch: over full texts, or over a cache of earlier tokens."""

    def __init__(self, engine: Engine, *, policy: RolloutPolicy, texts: int) -> None:
        self._engine, self._packs = engine, policy.packs
        self._cache: TextCache | None = None
        if policy.packs and has_cache(engine.module):
            self._cache = TextCache(texts=texts, longest=policy.length)
        self._computed = torch.zeros(texts, dtype=torch.int64)  # number of cached tokens of each text

    def logits(self, tokens: Tensor, *, rows: Tensor, lengths: Tensor, large: Answers | None) -> Tensor:
        """Returns the logits after texts `rows`, int64 [R], of `lengths` tokens each, int64 [R]: [R, V]. tokens: int64 [S, T]."""
        engine, device = self._engine, self._engine.process.device
        if self._cache is None:
            module = engine.module if self._packs else None
            layout = lay_out(tokens[rows], lengths=lengths, packs=self._packs, device=device, module=module)
            return self._of(layout, last=layout.at(lengths - 1), large=large)
        if self._computed.any():
            return self._continued(tokens, rows=rows, lengths=lengths, large=large)
        return self._begun(tokens, rows=rows, lengths=lengths, cache=self._cache, large=large)

    def _begun(
        self, tokens: Tensor, *, rows: Tensor, lengths: Tensor, cache: TextCache, large: Answers | None
    ) -> Tensor:
        """Same as `logits`, for prompts. Equal prompts are computed once."""
        prompts = [tuple(tokens[row, :length].tolist()) for row, length in zip(rows, lengths, strict=True)]
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        firsts = torch.tensor([prompts.index(prompt) for prompt in numbers])
        found = self._continued(tokens, rows=rows[firsts], lengths=lengths[firsts], large=large)
        which = torch.tensor([numbers[prompt] for prompt in prompts])
        sources = rows[firsts[which]]
        for source, row, length in zip(sources.tolist(), rows.tolist(), lengths.tolist(), strict=True):
            if source != row:
                cache.copy(source, target=row, positions=length)
        self._computed[rows] = lengths
        return found[which]

    def _continued(self, tokens: Tensor, *, rows: Tensor, lengths: Tensor, large: Answers | None) -> Tensor:
        """Same as `logits`, with the cache of earlier tokens."""
        engine, cache = self._engine, self._cache
        since = self._computed[rows].minimum(lengths - 1)
        new = new_tokens(tokens, rows=rows, since=since, until=lengths)
        self._computed[rows] = lengths
        last = new.starts + lengths - since - 1
        assert cache is not None, "a cache of earlier tokens"
        layout, spans = lay_out_new(new, filling=cache.texts, module=engine.module, device=engine.process.device)
        with cache.used(engine.module, spans=spans):
            return self._of(layout, last=last.to(engine.process.device), large=large)

    def _of(self, layout: Layout, *, last: Tensor, large: Answers | None) -> Tensor:
        def rows_of(model: Any) -> Tensor:
            if large is not None:
                return large.logits(layout, index=last, model=model)
            return layout.forward(model).flatten(0, 1).index_select(0, last)

        return self._engine.compute([layout.micro_batch(rows_of)])[0]


def _computed(active: Tensor) -> Tensor:
    """Returns the texts of a forward, int64 [R]: unfinished ones, or a single text if there are none, because other ranks may run a
    forward.
    """
    rows = active.nonzero().squeeze(1)
    return rows if len(rows) else torch.zeros(1, dtype=torch.int64)


def any_rank(engine: Engine, *, flag: bool) -> bool:
    """Returns whether any rank has this flag. Ranks run the same number of forwards, because a forward may gather parameters."""
    if engine.comm.size == 1:
        return flag
    own = torch.tensor([float(flag)], device=engine.process.device)
    return bool(engine.comm.gather_scalars(own, label="unfinished answers").any())
