"""Rollouts of two ways with one interface: the training forward (`TrainerRollouts`), or the inference engine (`cached.CachedRollouts`).

Both draw with the same random numbers, so that they draw the same tokens where their log-probabilities have the same bits.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ztk.inference.sample import choose, fp32_logprobs
from ztk.inference.uniforms import sample_keys, uniforms
from ztk.rl.rollout.buffer import Samples
from ztk.rl.rollout.head import answer_logits, has_large_logits, sampled_logprobs
from ztk.rl.rollout.kept import Entries, entries_of
from ztk.rl.rollout.layout import Layout, lay_out
from ztk.rl.rollout.weights import RolloutPolicy, rollout_weights
from ztk.train.engine import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """The samples that this rank generates, S of them. prompts: their tokens. numbers: the samples' in the step over all ranks, int64
    [S].

    prompt_numbers: their prompts' numbers in the run. copies: index among the prompt's samples. int64 [S] each. late: event after
    which servers end each answer that has a token. Other ways to draw ignore it.
    """

    prompts: Sequence[Sequence[int]]
    numbers: Tensor
    prompt_numbers: Tensor
    copies: Tensor
    late: threading.Event | None = None

    def keys(self, *, seed: int, step: int) -> Tensor:
        """Returns the key of each sample's random numbers, int64 [S]."""
        return sample_keys(seed=seed, step=step, prompts=self.prompt_numbers, samples=self.copies)

    def begin(self, policy: RolloutPolicy) -> Samples:
        """Returns samples that have only their prompts, with rewards of 0 and all included.

        Raises ValueError for a prompt without a token, and for one that leaves no room for the answer.
        """
        lengths = torch.tensor([len(prompt) for prompt in self.prompts])
        if (longest := int(lengths.max())) + policy.max_tokens > policy.length:
            raise ValueError(
                f"a prompt of {longest} tokens and rollout.max_tokens={policy.max_tokens} do not fit into data.seq_len={policy.length}: use "
                f"data.seq_len={longest + policy.max_tokens}"
            )
        if int(lengths.min()) < 1:
            raise ValueError("a prompt has no token: an answer needs something to follow")
        tokens = torch.full((len(lengths), policy.length), policy.pad, dtype=torch.int64)
        for row, prompt in zip(tokens, self.prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
        return Samples(
            tokens=tokens,
            numbers=self.numbers,
            prompts=self.prompt_numbers,
            prompt_lengths=lengths,
            answer_lengths=torch.zeros_like(lengths),
            finished=torch.zeros(len(lengths), dtype=torch.bool),
            logprobs=torch.zeros(tokens.shape, dtype=torch.float32),
            rewards=torch.zeros(len(lengths), dtype=torch.float64),
            included=torch.ones(len(lengths), dtype=torch.bool),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnDraws:
    """Samples answers turn by turn. A collective object: ranks whose forwards depend on each other make the same calls.

    draw: appends the next turn to samples, and sets their `finished` for turns that ended by themselves. limits int64 [S]: most tokens of
    this turn, 0 for a row that has ended. go_on: whether any rank has rows left, given whether this one has.
    """

    draw: Callable[[Samples, Tensor], None]
    go_on: Callable[[bool], bool]


class Rollouts(Protocol):
    """A way to draw. copies_weights: `turns` copies them to main memory, so that its draws may be made while the engine steps."""

    copies_weights: bool

    def turns(self, *, policy: RolloutPolicy, requests: Requests, step: int) -> AbstractContextManager[TurnDraws]:
        """Prepares draws of these requests. A collective call."""
        ...


def generate(rollouts: Rollouts, *, policy: RolloutPolicy, requests: Requests, step: int) -> Samples:
    """Generates an answer to every prompt, with rewards of 0 and all samples included.

    A collective call with the same number of samples on every rank, except for copied weights of this rank alone.

    Raises:
        ValueError: a prompt that leaves no room for the answer, or a model that the inference engine does not support.
        FloatingPointError: logits are not finite.
    """
    with rollouts.turns(policy=policy, requests=requests, step=step) as draws:
        return draw_once(draws, policy=policy, requests=requests)


def draw_once(draws: TurnDraws, *, policy: RolloutPolicy, requests: Requests) -> Samples:
    """Draws a single turn. Raises as `generate`."""
    samples = requests.begin(policy)
    draws.draw(samples, torch.full_like(samples.lengths, policy.max_tokens))
    check_finite(samples)
    return samples


class TrainerRollouts:
    """Draws with the forward of the engine in training, at any stage and tier: the reference, in which a token takes a full forward.

    Rows have the trainer's shape, or texts are packed; see [Note: The trainer's bits] in `equality`. Packed forwards omit finished texts.
    """

    copies_weights = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @contextmanager
    def turns(self, *, policy: RolloutPolicy, requests: Requests, step: int) -> Iterator[TurnDraws]:
        """Yields the draws of `Rollouts.turns`."""
        engine, size = self._engine, policy.micro_batch
        keys = requests.keys(seed=policy.seed, step=step)

        def draw(samples: Samples, limits: Tensor) -> None:
            entries = list[Entries]()
            positions = samples.lengths.unsqueeze(1) + torch.arange(policy.max_tokens)
            draws = uniforms(keys.unsqueeze(1), positions=positions)
            for first in range(0, len(samples), size):
                rows = slice(first, first + size)
                kept = _answer(engine, policy=policy, samples=samples[rows], limits=limits[rows], draws=draws[rows])
                entries += [(own + first, positions, tokens) for own, positions, tokens in kept]
            samples.keep(entries)

        with rollout_weights(engine, weights=policy.weights):
            yield TurnDraws(draw=draw, go_on=lambda flag: any_rank(engine, flag=flag))


def check_finite(samples: Samples) -> None:
    """Raises FloatingPointError for a log-probability that is not finite."""
    if not samples.logprobs.isfinite().all():
        row = int((~samples.logprobs.isfinite()).any(1).nonzero()[0])
        raise FloatingPointError(f"sample {int(samples.numbers[row])}: the policy's logits are not finite")


def _answer(engine: Engine, *, policy: RolloutPolicy, samples: Samples, limits: Tensor, draws: Tensor) -> list[Entries]:
    """Appends an answer of up to `limits` tokens, int64 [S], to each of the samples, in place. Returns the kept tokens.

    draws: a number in [0, 1) for each answer and token, float64 [S, max_tokens].
    """
    tokens, device = samples.tokens, engine.process.device
    S, T = tokens.shape
    counts, active = torch.zeros_like(limits), limits > 0
    samples.finished[active] = False
    are_large = has_large_logits(engine, tokens=tokens.numel())
    options = {"packs": policy.packs, "device": device, "module": engine.module if policy.packs else None}
    stops, entries = torch.tensor(policy.stops), list[Entries]()
    for index in range(policy.max_tokens):
        if not any_rank(engine, flag=bool(active.any())):
            break
        rows = _computed(active) if policy.packs else torch.arange(S)
        positions, goes_on = samples.lengths[rows], active[rows]  # positions: of the tokens sampled now
        layout = lay_out(tokens[rows], lengths=positions, **options)
        last = torch.arange(T) == positions.clamp(max=T - 1).unsqueeze(1)  # of a full text, whose logits are not read

        def next_logits(model: Any, layout: Layout = layout, last: Tensor = last) -> Tensor:
            return answer_logits(model, layout=layout, mask=last, are_large=are_large)

        [logits] = engine.compute([layout.micro_batch(next_logits)])
        if not policy.cut.keeps_all:
            logits, kept = policy.cut.hide(logits, temperature=policy.temperature)
            own = kept[goes_on.to(kept.device)].cpu()
            entries.append(entries_of(own, rows=rows[goes_on], positions=positions[goes_on]))
        distribution = fp32_logprobs(logits, temperature=policy.temperature).cpu()
        drawn = choose(distribution, uniforms=draws[rows, index])
        if are_large:  # with the function that the update uses for chunks
            chosen = sampled_logprobs(logits, tokens=drawn, temperature=policy.temperature)
        else:
            chosen = distribution.gather(1, drawn.unsqueeze(1)).squeeze(1)
        where = rows[goes_on], positions[goes_on]
        tokens[where], samples.logprobs[where] = drawn[goes_on], chosen[goes_on]
        counts += active
        samples.answer_lengths += active
        samples.finished[rows] |= goes_on & torch.isin(drawn, stops)
        active &= ~samples.finished & (counts < limits)
    return entries


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
