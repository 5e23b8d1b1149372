"""Rollouts of two ways with one interface: the training forward (`TrainerRollouts`), or the inference engine (`cached.CachedRollouts`).

Both draw with the same random numbers, so that they draw the same tokens where their log-probabilities have the same bits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ztk.inference.sample import choose, fp32_logprobs
from ztk.inference.uniforms import sample_keys, uniforms
from ztk.rl.rollout.answering import Part, RolloutPolicy, joined
from ztk.rl.rollout.buffer import Samples
from ztk.rl.rollout.head import answer_logits, has_large_logits, sampled_logprobs
from ztk.rl.rollout.kept import Kept, entries_of
from ztk.rl.rollout.layout import Layout, lay_out
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

    def keys(self, *, seed: int, step: int) -> Tensor:
        """Returns the key of each sample's random numbers, int64 [S]."""
        return sample_keys(seed=seed, step=step, prompts=self.prompt_numbers, samples=self.copies)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnDraws:
    """Samples answers turn by turn. A collective object: ranks whose forwards depend on each other make the same calls.

    draw: appends the next turn of all rows to tokens int64 [S, T] with texts of lengths int64 [S]. limits int64 [S]: most tokens of this
    turn, 0 for a row that has ended. go_on: whether any rank has rows left, given whether this one has. complete: adds the experts that
    drew the samples, if the policy keeps them.
    """

    draw: Callable[[Tensor, Tensor, Tensor], Part]
    go_on: Callable[[bool], bool]
    complete: Callable[[Samples], Samples] = lambda samples: samples


class Rollouts(Protocol):
    """A way to draw. copies_weights: `turns` copies them to main memory, so that its draws may be made while the engine steps."""

    copies_weights: bool

    def turns(
        self, *, policy: RolloutPolicy, requests: Requests, step: int, once: bool = False
    ) -> AbstractContextManager[TurnDraws]:
        """Prepares draws of these requests. A collective call. once: for a single turn."""
        ...


def generate(rollouts: Rollouts, *, policy: RolloutPolicy, requests: Requests, step: int) -> Samples:
    """Generates an answer to every prompt, with rewards of 0 and all samples included.

    A collective call with the same number of samples on every rank, except for copied weights of this rank alone.

    Raises:
        ValueError: a prompt that leaves no room for the answer, a number of samples that is not a multiple of the trainer's micro-batch, or
            a model that the inference engine does not support.
        FloatingPointError: logits are not finite.
    """
    with rollouts.turns(policy=policy, requests=requests, step=step, once=True) as draws:
        return draw_once(draws, policy=policy, requests=requests)


def draw_once(draws: TurnDraws, *, policy: RolloutPolicy, requests: Requests) -> Samples:
    """Draws a single turn. Raises as `generate`."""
    tokens, lengths = first_tokens(policy, requests=requests)
    counts, logprobs, finished, kept = draws.draw(tokens, lengths, torch.full_like(lengths, policy.max_tokens))
    check_finite(logprobs, requests=requests)
    samples = Samples(
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
    return draws.complete(samples)


class TrainerRollouts:
    """Draws with the forward of the engine in training, at any stage and tier: the reference, in which a token takes a full forward.

    Rows have the trainer's shape, or texts are packed; see [Note: The trainer's bits] in `equality`. Packed forwards omit finished texts.
    """

    copies_weights = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @contextmanager
    def turns(self, *, policy: RolloutPolicy, requests: Requests, step: int, once: bool = False) -> Iterator[TurnDraws]:
        """As `Rollouts.turns`. Raises ValueError for a number of samples that is not a multiple of the micro-batch."""
        engine, size = self._engine, policy.micro_batch
        if len(requests.prompts) % size:
            raise ValueError(
                f"{len(requests.prompts)} samples of a rank are no multiple of train.micro_batch_size={size}: the rollout's forwards have the "
                "trainer's shape"
            )
        keys = requests.keys(seed=policy.seed, step=step)

        def draw(tokens: Tensor, lengths: Tensor, limits: Tensor) -> Part:
            draws = draws_after(lengths, keys=keys, count=policy.max_tokens)
            parts = []
            for first in range(0, len(tokens), size):
                rows = slice(first, first + size)
                given = {"tokens": tokens[rows], "lengths": lengths[rows], "limits": limits[rows], "draws": draws[rows]}
                parts.append(_answer(engine, policy=policy, **given))
            return joined(parts)

        with rollout_weights(engine, weights=policy.weights):
            yield TurnDraws(draw=draw, go_on=lambda flag: any_rank(engine, flag=flag))


def draws_after(lengths: Tensor, *, keys: Tensor, count: int) -> Tensor:
    """Returns the random numbers for `count` tokens after texts of `lengths`, int64 [S]: float64 [S, count]."""
    return uniforms(keys.unsqueeze(1), positions=lengths.unsqueeze(1) + torch.arange(count))


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
    engine: Engine, *, policy: RolloutPolicy, tokens: Tensor, lengths: Tensor, limits: Tensor, draws: Tensor
) -> Part:
    """Writes an answer of up to `limits` tokens, int64 [S], into each row of tokens, int64 [S, T], after a text of `lengths`, int64 [S].

    draws: a number in [0, 1) for each answer and token, float64 [S, max_tokens].
    """
    T, device = tokens.shape[1], engine.process.device
    logprobs = torch.zeros(tokens.shape, dtype=torch.float32)
    counts, active = torch.zeros_like(lengths), limits > 0
    finished = torch.zeros_like(active)
    are_large = has_large_logits(engine, tokens=tokens.numel())
    options = {"packs": policy.packs, "device": device, "module": engine.module if policy.packs else None}
    stops, entries = torch.tensor(policy.stops), []
    for index in range(policy.max_tokens):
        if not any_rank(engine, flag=bool(active.any())):
            break
        rows = _computed(active) if policy.packs else torch.arange(len(tokens))
        positions, goes_on = (lengths + counts)[rows], active[rows]  # positions: of the tokens sampled now
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
        tokens[where], logprobs[where] = drawn[goes_on], chosen[goes_on]
        counts += active
        finished[rows] |= goes_on & torch.isin(drawn, stops)
        active &= ~finished & (counts < limits)
    kept = Kept.of(entries, shape=(len(tokens), T)) if entries else None
    return Part(counts, logprobs, finished, kept)


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
