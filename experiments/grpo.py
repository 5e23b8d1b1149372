"""Train a policy by comparing answers to one prompt with each other (GRPO and its kin): the program of every rank of `task=grpo`."""

from torch import Tensor

from experiments import policies
from experiments.models import warm_start
from experiments.pretrain import build_reporter
from experiments.rollouts import (
    Run,
    Savers,
    Texts,
    check_guards,
    correction_of,
    counted,
    draw,
    evaluate,
    logprobs_of,
    measure,
    open_run,
    resume,
    table_of,
    update_policy,
    weights_of,
)
from ztk import kernels
from ztk.config import Config
from ztk.report import Reporter
from ztk.rollout import Samples
from ztk.rollout.objective import equal_groups, group_advantages
from ztk.runtime import Process


def main(config: Config) -> None:
    """Runs one rank from start to end. Raises ValueError for a configuration that does not fit, RolloutStopped when a guard ends the run."""
    kernels.set_backend(config.kernels.backend)
    process = Process.start(device=config.launch.device, timeout_seconds=config.launch.timeout_seconds)
    process = process.arrange(policies.topology(config))
    continues = config.checkpoint.resume not in (None, "auto")
    first_values = None if continues else warm_start(config, process=process)
    run = open_run(config, process=process, first_values=first_values, lr_table=policies.learning_rates(config))
    past = resume(run)
    with build_reporter(config, engine=run.actor, past=past) as reporter:
        before = evaluate(run)
        train(run, reporter=reporter)
        after = evaluate(run)
        reporter.finish(**run.metrics, reward_before=before, reward_after=after)
        reporter.say(f"mean reward of sampled answers: {before:.3f} before, {after:.3f} after")
    run.close()
    process.stop()


def train(run: Run, *, reporter: Reporter) -> None:
    """Optimizer steps up to `train.steps`; a rollout whenever the buffer is used up."""
    config, engine = run.config, run.actor
    texts = Texts(run, first_step=engine.global_steps)
    with Savers(run) as savers:
        for step in range(engine.global_steps + 1, config.train.steps + 1):
            if run.buffer.is_used_up:
                roll_out(run, reporter=reporter, texts=texts, savers=savers)
            update = update_policy(run)
            run.buffer.position += 1
            run.metrics |= {"entropy": update.entropy}
            saves = bool(config.checkpoint.every) and step % config.checkpoint.every == 0
            reporter.step(
                loss=update.loss,
                tokens=config.train.global_batch_size * config.data.seq_len,
                metrics=engine.read_metrics,
                row=saves,
                **run.metrics,
                clipped=update.clipped,
                rollout_differing=update.differing,
            )
            if saves:
                with reporter.aside():
                    savers.save(extra=reporter.past())


def roll_out(run: Run, *, reporter: Reporter, texts: Texts, savers: Savers) -> None:
    """Draws, scores and measures samples, and fills the buffer with them. Raises RolloutStopped when a guard ends the run."""
    config, step = run.config, run.actor.global_steps + 1
    samples = draw(run)
    run.rollouts += 1
    reference = logprobs_of(run.reference, run=run, samples=samples)
    kl = None if reference is None else ((samples.logprobs - reference) * samples.answer_mask).sum(1)
    table = table_of(run, samples=samples, kl=kl)
    run.metrics = {"entropy": run.metrics.get("entropy", float("inf"))} | measure(run, table=table)
    if config.rollout.show_every and (step == 1 or step % config.rollout.show_every == 0):
        reporter.say(texts.show(run, step=step, samples=samples, kl=kl))
    check_guards(run, step=step, savers=savers, reporter=reporter)
    rewards, groups, included = table["reward"], table["prompt"].long(), table["included"].bool()
    if config.kl.place == "reward" and kl is not None:
        rewards = rewards - config.kl.coef * table["kl"]
    advantages = group_advantages(
        rewards,
        groups=groups,
        included=included,
        baseline=config.advantage.baseline.value,
        scale=config.advantage.scale.value,
    )
    equal = equal_groups(table["reward"], groups=groups, included=included)[samples.numbers]
    counts = counted(run, samples=samples, equal=equal)
    fill(run, samples=samples, counts=counts, reference=reference, advantages=advantages[samples.numbers])


def fill(run: Run, *, samples: Samples, counts: Tensor, reference: Tensor | None, advantages: Tensor) -> None:
    """advantages: per sample, float64 [S]."""
    trainer = None
    if run.config.rollout.identity == "corrected":
        trainer = logprobs_of(run.actor, run=run, samples=samples)
    extra = {
        "old": samples.logprobs if trainer is None else trainer,
        "advantages": advantages.float().unsqueeze(1) * samples.answer_mask,
        "weights": weights_of(run, samples=samples, counts=counts),
        "correction": correction_of(run, samples=samples, trainer=trainer),
        "reference": reference if run.config.kl.place == "loss" else None,
    }
    run.buffer.fill(samples, **{name: value for name, value in extra.items() if value is not None})
