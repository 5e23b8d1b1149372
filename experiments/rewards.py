"""Rewards of a rollout, by functions, by the model of `reward.path`, or by both, and their means for a step's row."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.experiments.policy_run import Run
from ztk.experiments.served_rewards import ServedReward
from ztk.rl.align import Prompt
from ztk.rl.rollout import Drawn, Episode, Samples
from ztk.rl.rollout.rewards import Answered, Rewarded, RewardFunctions, TrainingState


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """Rewards that are under way. given: the answers. functions: waits for the functions' rewards. learned: values of the servers, if they
    have the reward model.
    """

    given: Answered
    functions: Callable[[], Rewarded] | None
    learned: Tensor | None


def overlaps(run: Run) -> bool:
    """Whether rewards can begin before an update ends. Rewards of coroutines and servers can, because they use no engine of the run."""
    functions, served = run.prompts.rewards, isinstance(run.reward_model, ServedReward)
    return run.process.mesh.is_alone and (served or (functions is not None and functions.overlap))


def begin(run: Run, *, drawn: Drawn, prompts: list[Prompt]) -> Begun:
    """Starts coroutines, and waits for servers. Plain functions are called when the samples are used. Raises as `ServedReward.score`."""
    samples, functions, model = drawn.samples, run.prompts.rewards, run.reward_model
    assert samples.steps is not None, "they are drawn"
    step = int(samples.steps[samples.answer_mask].min())  # also of a resumed run, whose update may be another one
    given = answered(run, samples=samples, prompts=prompts, episodes=drawn.episodes, step=step)
    waits = None if functions is None else functions.begin(given)
    options = {"answered": given, "micro_batch": run.config.train.micro_batch_size}
    learned = model.score(samples, **options) if isinstance(model, ServedReward) else None
    return Begun(given=given, functions=waits, learned=learned)


def reward(run: Run, *, samples: Samples, prompts: list[Prompt], begun: Begun | None = None) -> None:
    """Writes the rewards into `samples` and the rewards of each function into `run.rewarded`. Raises RewardError."""
    config, functions = run.config, run.prompts.rewards
    if begun is None:
        step = run.actor.global_steps
        given = answered(run, samples=samples, prompts=prompts, episodes=run.episodes, step=step)
        begun = Begun(given=given, functions=None, learned=None)
    given = begun.given
    if functions is None:
        run.rewarded = None
    else:
        run.rewarded = scored(run, functions=functions, given=given) if begun.functions is None else begun.functions()
    total = None if run.rewarded is None else run.rewarded.total
    if run.environments is not None:
        total = with_steps(run, total=total)
    if run.reward_model is not None:
        learned = valued(run, samples=samples, given=given) if begun.learned is None else begun.learned
        weight = config.reward.path_weight
        total = learned if weight is None or total is None else total.nan_to_num() + weight * learned
    assert total is not None, "the configuration is checked"
    samples.rewards, samples.included = total.nan_to_num(), ~total.isnan()


def scored(run: Run, *, functions: RewardFunctions, given: Answered) -> Rewarded:
    """Calls the functions once per answer: on a replica's leader if several ranks share the model, which may not be deterministic.

    A collective call then.
    """
    mesh = run.process.mesh
    if mesh.is_alone:
        return functions.score(given)
    return mesh.gather_objects(functions.score(given) if mesh.is_leader else None)[mesh.replica]


def valued(run: Run, *, samples: Samples, given: Answered) -> Tensor:
    """Returns the values of the reward model. Servers are asked by a replica's leader, whose servers may not have the others' bits.

    A collective call.
    """
    model, mesh = run.reward_model, run.process.mesh
    assert model is not None, "the configuration is checked"
    options = {"answered": given, "micro_batch": run.config.train.micro_batch_size}
    if mesh.is_alone or not isinstance(model, ServedReward):
        return model.score(samples, **options)
    return mesh.gather_objects(model.score(samples, **options) if mesh.is_leader else None)[mesh.replica]


def with_steps(run: Run, *, total: Tensor | None) -> Tensor:
    """The sums of the environments' rewards, and of the functions' where there are any; NaN for an answer without either."""
    steps = torch.tensor([episode.reward for episode in run.episodes], dtype=torch.float64)
    if total is None:
        return steps
    return torch.where(steps.isnan() & total.isnan(), math.nan, steps.nan_to_num() + total.nan_to_num())


def answered(run: Run, *, samples: Samples, prompts: list[Prompt], episodes: Sequence[Episode], step: int) -> Answered:
    """Returns the answers in the form for reward functions. step: number of optimizer steps so far."""
    texts, records = [prompt.text for prompt in prompts], [prompt.record for prompt in prompts]
    is_chat, conversations = [prompt.is_chat for prompt in prompts], None
    if run.environments is not None:
        texts = [run.prompts.prompt_of(samples, row=row) for row in range(len(prompts))]
        records = [
            {**prompt.record, "prompt": episode.asked} for prompt, episode in zip(prompts, episodes, strict=True)
        ]
        is_chat = [not isinstance(episode.said, str) for episode in episodes]
        conversations = [episode.answered for episode in episodes]
    return Answered(
        texts=texts,
        answers=[run.prompts.answer_of(samples, row=row) for row in range(len(prompts))],
        token_ids=[samples.answer(row).tolist() for row in range(len(prompts))],
        records=records,
        is_chat=is_chat,
        state=TrainingState(global_step=step, max_steps=run.config.train.steps),
        conversations=conversations,
    )


def reward_metrics(run: Run) -> dict[str, float]:
    """Returns the means of every entry of `reward.functions` and of every value that functions log, over the newest samples of all ranks.

    If only the reward model trains, includes the sum of the functions too. A collective call.
    """
    found, config = run.rewarded, run.config
    if found is None:
        return {}
    means: dict[str, Tensor] = {}
    if run.reward_model is not None and config.reward.path_weight is None:
        means["true_reward"] = found.total
    if config.reward.functions and run.prompts.rewards is not None:
        names = (f"rewards.{name}" for name in run.prompts.rewards.names)
        means |= dict(zip(names, found.values.unbind(1), strict=True))
    means |= {name: torch.tensor(values, dtype=torch.float64) for name, values in found.logged.items()}
    return means_of_ranks(run, means=means) if run.prompts.is_own_reward else {}


def means_of_ranks(run: Run, *, means: dict[str, Tensor]) -> dict[str, float]:
    """Averages over all ranks, which may have logged different names. Drops non-finite values, which a checkpoint cannot contain."""
    own = {name: (float(values.nansum()), int((~values.isnan()).sum())) for name, values in means.items()}
    ranks = run.process.mesh.gather_objects(own)
    merged = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        totals = [rank.get(name, (0.0, 0)) for rank in ranks]
        count = sum(number for _, number in totals)
        merged[name] = math.fsum(total for total, _ in totals) / count if count else math.nan
    return {name: value for name, value in merged.items() if math.isfinite(value)}
