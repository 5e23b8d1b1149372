"""Answers of several turns: a policy and an environment alternately append to the same row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ztk.rl.align import Encoding
from ztk.rl.rollout.buffer import Samples
from ztk.rl.rollout.environments import Environments, Episode
from ztk.rl.rollout.hybrid import Requests, TurnDraws, check_finite
from ztk.rl.rollout.weights import RolloutPolicy

DONE, MAX_TURNS, MAX_TOKENS = "done", "max_turns", "max_tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodePolicy:
    """rollout: policy for a whole answer; its `max_tokens` limits the tokens of policy and environment together. max_turns: most steps of an
    episode.
    """

    rollout: RolloutPolicy
    encoding: Encoding
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
    samples = requests.begin(policy.rollout)
    samples.observed = torch.zeros(samples.tokens.shape, dtype=torch.bool)
    limits = torch.full_like(samples.lengths, policy.rollout.max_tokens)
    for _ in range(policy.max_turns):
        before, active = samples.lengths, limits.nonzero().squeeze(1).tolist()
        draws.draw(samples, limits)
        check_finite(samples)
        limits -= samples.lengths - before
        own = [episodes[row] for row in active]
        after = samples.lengths - samples.finished.long()  # without the tokens that end answers
        decode = policy.encoding.tokenizer.decode
        answers = [decode(samples.tokens[row, before[row] : after[row]]) for row in active]
        steps = environments.step(own, answers=answers)
        for row, episode, answer, step in zip(active, own, answers, steps, strict=True):
            new: list[int] = []
            if not samples.finished[row]:
                episode.outcome = MAX_TOKENS
            elif step.done:
                episode.outcome = DONE
            elif episode.turns == policy.max_turns:
                episode.outcome = MAX_TURNS
            else:
                assert step.observation is not None, "the step was checked"
                try:
                    new = policy.encoding.between(episode.said, observed=step.observation, tools=episode.tools)
                except ValueError as error:
                    raise environments.refused(episode, error=error) from None
                if len(new) >= int(limits[row]):  # leaves no room for an answer
                    episode.outcome = MAX_TOKENS
            if episode.outcome:
                episode.extend(answer)
                limits[row] = 0
            else:
                episode.extend(answer, observed=step.observation)
                _observe(new, samples=samples, row=row)
                limits[row] -= len(new)
        if not draws.go_on(bool(limits.any())):
            break
    samples.finished = torch.tensor([episode.outcome != MAX_TOKENS for episode in episodes])
    return samples


def _observe(tokens: list[int], *, samples: Samples, row: int) -> None:
    """Appends an observation to a row."""
    assert samples.observed is not None, "set at the beginning"
    first = int(samples.lengths[row])
    places = slice(first, first + len(tokens))
    samples.tokens[row, places] = torch.tensor(tokens, dtype=torch.int64)
    samples.observed[row, places] = True
    samples.answer_lengths[row] += len(tokens)
