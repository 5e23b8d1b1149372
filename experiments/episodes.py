"""Rollouts with `rollout.environment`: episodes of this rank, their metrics, and their columns in the table of completions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ztk.experiments.policy_run import Run
from ztk.experiments.rewards import means_of_ranks
from ztk.rl.align import Encoding, Prompt
from ztk.rl.rollout import Drawn, Environments, Episode, EpisodePolicy, Requests, RolloutPolicy, TurnDraws, play
from ztk.rl.rollout.episodes import DONE, MAX_TURNS


def played(
    run: Run, *, draws: TurnDraws, prompts: Sequence[Prompt], policy: RolloutPolicy, requests: Requests
) -> Drawn:
    """Plays this rank's episodes. A collective call. Raises EnvironmentFault."""
    config, environments = run.config, run.environments
    assert environments is not None and config.rollout.max_turns is not None, "the configuration is checked"
    encoding = run.prompts.encoding
    own = EpisodePolicy(rollout=policy, encoding=encoding, max_turns=config.rollout.max_turns)
    episodes, tokens = _begun(environments, prompts=prompts, encoding=encoding, numbers=requests.numbers.tolist())
    given = {"requests": replace(requests, prompts=tokens), "environments": environments, "episodes": episodes}
    return Drawn(samples=play(draws, policy=own, **given), episodes=episodes)


def _begun(
    environments: Environments, *, prompts: Sequence[Prompt], encoding: Encoding, numbers: Sequence[int]
) -> tuple[list[Episode], list[list[int]]]:
    """Returns episodes with their environments, and the tokens of their prompts. numbers: the samples'. Raises EnvironmentFault."""
    episodes = [Episode.of(prompt, number=number) for number, prompt in zip(numbers, prompts, strict=True)]
    before = [episode.said for episode in episodes]
    environments.reset(episodes)
    tokens = [
        prompt.tokens if episode.said == said else encoding.prompt(episode.said, tools=episode.tools).tokens
        for episode, said, prompt in zip(episodes, before, prompts, strict=True)
    ]
    return episodes, tokens


def episode_metrics(run: Run) -> dict[str, float]:
    """Returns the mean number of turns, and the fractions of episodes that ended by `done` and at `rollout.max_turns`.

    Other episodes were cut at `rollout.max_tokens`. A collective call with environments. Without environments, returns no metrics.
    """
    if run.environments is None:
        return {}
    means: dict[str, Tensor] = {"turns": torch.tensor([episode.turns for episode in run.episodes]).double()}
    for name, outcome in (("ended_done", DONE), ("ended_max_turns", MAX_TURNS)):
        means[name] = torch.tensor([episode.outcome == outcome for episode in run.episodes]).double()
    return means_of_ranks(run, means=means)


def of_episode(episode: Episode) -> dict[str, Any]:
    """Returns the columns of an answer in the table of completions."""
    return {"turns": episode.turns, "ended": episode.outcome, "turn_rewards": list(episode.rewards)}
