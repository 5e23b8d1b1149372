"""Trains a policy by comparing answers to the same prompt (GRPO and variants): the program of every rank of `task=grpo`."""

from ztk.config import Config
from ztk.experiments.policy_update import counted, fill_buffer, update_policy
from ztk.experiments.rollout_loop import run_rank
from ztk.experiments.rollout_run import Run
from ztk.experiments.rollouts import Scored
from ztk.rl.align import group_advantages


def main(config: Config) -> None:
    """Runs one rank from start to end. Raises as `rollout_loop.run_task`."""
    run_rank(config, fill=fill, update=update_policy)


def fill(run: Run, scored: Scored) -> None:
    """Computes the advantage of an answer, the same for all its tokens, by comparing its reward with the other answers to the same
    prompt.
    """
    config, samples = run.config, scored.samples
    advantages = group_advantages(
        scored.table["reward"] - scored.table["penalty"],
        groups=scored.groups,
        included=scored.included,
        baseline=config.advantage.baseline,
        scale=config.advantage.scale,
    )
    fill_buffer(
        run,
        scored=scored,
        counts=counted(run, scored=scored),
        advantages=advantages[samples.numbers].float().unsqueeze(1) * samples.answer_mask,
    )
