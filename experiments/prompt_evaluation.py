"""Evaluation of `task=grpo` and `task=ppo` between steps, on separate prompts with separate rewards."""

from dataclasses import replace

from experiments.prompts import Prompts
from experiments.rollout_run import Run
from experiments.rollouts import UNTRAINED, draw, drawing, measure, score_samples
from ztk.config import Config, evaluation_config


def has_evaluations(config: Config) -> bool:
    """Returns whether the run evaluates prompts between steps."""
    return bool(config.rollout.eval_every or config.checkpoint.keep_best)


def open_evaluation_prompts(config: Config, *, prompts: Prompts) -> Prompts:
    """Opens the prompts of `data.eval_path` with the functions of `reward.eval_functions`. Both default to training's.

    Raises:
        ValueError: as `Prompts`.
    """
    own = evaluation_config(config)
    return prompts if own is None else Prompts(own)


def evaluate_prompts(run: Run, *, prompts: Prompts) -> dict[str, float]:
    """Returns the metrics of `rollout.eval_rollouts` rollouts as `eval_NAME`, over all ranks. Raises RewardError."""
    config = run.config
    own = replace(
        run,
        prompts=prompts,
        reward_model=None if config.reward.eval_functions else run.reward_model,
        metrics={},
    )
    first = UNTRAINED if prompts.count is None else -(-UNTRAINED // prompts.count) * prompts.count
    found = []
    with drawing(run):
        for number in range(config.rollout.eval_rollouts or 1):
            samples = draw(own, first_prompt=first + number * config.rollout.prompts)
            found.append(measure(own, scored=score_samples(own, samples=samples)))
    names = dict.fromkeys(name for metrics in found for name in metrics)
    values = {name: [metrics[name] for metrics in found if name in metrics] for name in names}
    return {f"eval_{name}": sum(own) / len(own) for name, own in values.items()}
