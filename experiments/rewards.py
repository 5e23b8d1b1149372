"""Rewards of a rollout: by functions, by the model of `reward.path`, or by both; and their means for a step's row."""

import math

import torch
from torch import Tensor

from experiments.learned_reward import learned_rewards
from experiments.prompts import Prompt
from experiments.rollout_run import Run
from experiments.text_reward import TextReward
from ztk.rl.rollout import Samples
from ztk.rl.rollout.rewards import Answered, TrainingState


def reward(run: Run, *, samples: Samples, prompts: list[Prompt]) -> None:
    """Writes the rewards into `samples` and the rewards of each function into `run.rewarded`. Raises RewardError."""
    config, functions = run.config, run.prompts.rewards
    given = answered(run, samples=samples, prompts=prompts)
    run.rewarded = None if functions is None else functions.score(given)
    total = None if run.rewarded is None else run.rewarded.total
    if run.reward_model is not None:
        size = config.train.micro_batch_size
        if isinstance(run.reward_model, TextReward):
            learned = run.reward_model.score(given, micro_batch=size)
        else:
            learned = learned_rewards(run.reward_model, samples=samples, micro_batch=size)
        weight = config.reward.path_weight
        total = learned if weight is None or total is None else total.nan_to_num() + weight * learned
    assert total is not None, "the configuration is checked"
    samples.rewards, samples.included = total.nan_to_num(), ~total.isnan()


def answered(run: Run, *, samples: Samples, prompts: list[Prompt]) -> Answered:
    """The answers as reward functions get them."""
    return Answered(
        texts=[prompt.text for prompt in prompts],
        answers=[run.prompts.answer_of(samples, row=row) for row in range(len(prompts))],
        token_ids=[tokens[mask].tolist() for tokens, mask in zip(samples.tokens, samples.answer_mask, strict=True)],
        records=[prompt.record for prompt in prompts],
        is_chat=[prompt.is_chat for prompt in prompts],
        state=TrainingState(global_step=run.actor.global_steps, max_steps=run.config.train.steps),
    )


def reward_metrics(run: Run) -> dict[str, float]:
    """Means over the newest samples of all ranks: of every entry of `reward.functions`, of what functions have logged, and of the functions'
    sum beside a model that trains alone. A collective call."""
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
    return _means(run, means=means) if run.prompts.is_own_reward else {}


def _means(run: Run, *, means: dict[str, Tensor]) -> dict[str, float]:
    """Over all ranks, which may have logged other names. Values that are not finite are left out: no checkpoint can hold them."""
    own = {name: (float(values.nansum()), int((~values.isnan()).sum())) for name, values in means.items()}
    ranks = run.process.comm.gather_objects(own)
    merged = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        totals = [rank.get(name, (0.0, 0)) for rank in ranks]
        count = sum(number for _, number in totals)
        merged[name] = math.fsum(total for total, _ in totals) / count if count else math.nan
    return {name: value for name, value in merged.items() if math.isfinite(value)}
