"""Answers of several turns: a policy and an environment alternately append to the same row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.rl.align.turns import Turns
from ztk.rl.rollout.answering import RolloutPolicy
from ztk.rl.rollout.buffer import Samples
from ztk.rl.rollout.environments import Environments, Episode
from ztk.rl.rollout.hybrid import Requests, TurnDraws, check_finite, first_tokens
from ztk.rl.rollout.kept import Kept

DONE, MAX_TURNS, MAX_TOKENS = "done", "max_turns", "max_tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodePolicy:
    """rollout: of a whole answer; its `max_tokens` limits the tokens of policy and environment together. max_turns: most steps of an
    episode.
    """

    rollout: RolloutPolicy
    turns: Turns
    max_turns: int


def play(
    draws: TurnDraws,
    *,
    policy: EpisodePolicy,
    requests: Requests,
    environments: Environments,
    episodes: Sequence[Episode],
) -> Samples:
    """Runs all episodes to their ends, in step: every row samples a turn, then every environment takes a step.

    requests: their prompts are the episodes' prompts after `Environments.reset`. Rewards are 0.

    Raises:
        ValueError: a prompt that leaves no room for an answer.
        EnvironmentFault: an environment failed.
        FloatingPointError: logits are not finite.
    """
    tokens, lengths = first_tokens(policy.rollout, requests=requests)
    rows = _Rows(tokens, lengths=lengths, max_tokens=policy.rollout.max_tokens)
    for _ in range(policy.max_turns):
        before = rows.lengths.clone()
        rows.draw(draws, requests=requests)
        active = rows.limits_before.nonzero().squeeze(1).tolist()
        own = [episodes[row] for row in active]
        answers = [policy.turns.answer(tokens[row, before[row] : rows.lengths[row]]) for row in active]
        steps = environments.step(own, answers=answers)
        for row, episode, answer, step in zip(active, own, answers, steps, strict=True):
            new: list[int] = []
            if not rows.ended[row]:
                episode.outcome = MAX_TOKENS
            elif step.done:
                episode.outcome = DONE
            elif episode.turns == policy.max_turns:
                episode.outcome = MAX_TURNS
            else:
                assert step.observation is not None, "the step was checked"
                try:
                    new = policy.turns.between(episode.said, observed=step.observation, tools=episode.tools)
                except ValueError as error:
                    raise environments.refused(episode, error=error) from None
                if len(new) >= int(rows.limits[row]):  # leaves no room for an answer
                    episode.outcome = MAX_TOKENS
            if episode.outcome:
                episode.extend(answer)
                rows.end(row)
            else:
                episode.extend(answer, observed=step.observation)
                rows.observe(row, new)
        if not draws.go_on(bool(rows.limits.any())):
            break
    return _samples(rows, first=lengths, requests=requests, episodes=episodes)


class _Rows:
    """Rows under construction. lengths: tokens so far. limits: tokens that may follow, 0 after the end. int64 [S] each."""

    def __init__(self, tokens: Tensor, *, lengths: Tensor, max_tokens: int) -> None:
        self.tokens, self.lengths = tokens, lengths.clone()
        self.limits = torch.full_like(lengths, max_tokens)
        self.limits_before = self.limits  # of the latest turn
        self.ended = torch.zeros(len(lengths), dtype=torch.bool)  # whether the latest turn ended by itself
        self.logprobs = torch.zeros(tokens.shape, dtype=torch.float32)
        self.observed = torch.zeros(tokens.shape, dtype=torch.bool)
        self.kept: list[Kept] = []

    def draw(self, draws: TurnDraws, *, requests: Requests) -> None:
        """Samples a turn of every row that has not ended. Raises FloatingPointError."""
        self.limits_before = self.limits.clone()
        part = draws.draw(self.tokens, self.lengths, self.limits_before)
        check_finite(part.logprobs, requests=requests)
        at, first = torch.arange(self.tokens.shape[1]), self.lengths.unsqueeze(1)
        drawn = (at >= first) & (at < first + part.counts.unsqueeze(1))
        self.logprobs = torch.where(drawn, part.logprobs, self.logprobs)
        self.lengths += part.counts
        self.limits -= part.counts
        self.ended = part.finished
        if part.kept is not None:
            self.kept.append(part.kept)

    def observe(self, row: int, tokens: list[int]) -> None:
        """Appends an observation."""
        first = int(self.lengths[row])
        places = slice(first, first + len(tokens))
        self.tokens[row, places] = torch.tensor(tokens, dtype=torch.int64)
        self.observed[row, places] = True
        self.lengths[row] += len(tokens)
        self.limits[row] -= len(tokens)

    def end(self, row: int) -> None:
        """Ends the row."""
        self.limits[row] = 0


def _samples(rows: _Rows, *, first: Tensor, requests: Requests, episodes: Sequence[Episode]) -> Samples:
    """Makes samples. first: the prompts' lengths, int64 [S]."""
    count = len(episodes)
    return Samples(
        tokens=rows.tokens,
        numbers=requests.numbers,
        prompts=requests.prompt_numbers,
        prompt_lengths=first,
        answer_lengths=rows.lengths - first,
        finished=torch.tensor([episode.outcome != MAX_TOKENS for episode in episodes]),
        logprobs=rows.logprobs,
        rewards=torch.zeros(count, dtype=torch.float64),
        included=torch.ones(count, dtype=torch.bool),
        kept=Kept.merged(rows.kept) if rows.kept else None,
        observed=rows.observed,
    )
