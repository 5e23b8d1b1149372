"""Train a policy with a critic (PPO): the program of every rank of `task=ppo`."""

import torch
from torch import Tensor

from experiments import policies
from experiments.models import values_of_states, warm_start
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
    micro_batches,
    open_run,
    resume,
    table_of,
    update_policy,
    update_rows,
    weights_of,
)
from ztk import kernels
from ztk.config import Config
from ztk.report import Reporter
from ztk.rollout import Samples
from ztk.rollout.objective import equal_groups, generalised_advantages, value_loss
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
    """Optimizer steps of both models up to `train.steps`; a rollout whenever the buffer is used up."""
    config, engine = run.config, run.actor
    texts = Texts(run, first_step=engine.global_steps)
    with Savers(run) as savers:
        for step in range(engine.global_steps + 1, config.train.steps + 1):
            if run.buffer.is_used_up:
                roll_out(run, reporter=reporter, texts=texts, savers=savers)
            critic_loss = update_critic(run)
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
                critic_loss=critic_loss,
                clipped=update.clipped,
                rollout_differing=update.differing,
            )
            if saves:
                with reporter.aside():
                    savers.save(extra=reporter.past())


def roll_out(run: Run, *, reporter: Reporter, texts: Texts, savers: Savers) -> None:
    """Draws, scores and values samples, and fills the buffer with them. Raises RolloutStopped when a guard ends the run."""
    config, step = run.config, run.actor.global_steps + 1
    samples = draw(run)
    run.rollouts += 1
    reference = logprobs_of(run.reference, run=run, samples=samples)
    log_ratio = None if reference is None else (samples.logprobs - reference) * samples.answer_mask
    kl = None if log_ratio is None else log_ratio.sum(1)
    table = table_of(run, samples=samples, kl=kl)
    run.metrics = {"entropy": run.metrics.get("entropy", float("inf"))} | measure(run, table=table)
    if config.rollout.show_every and (step == 1 or step % config.rollout.show_every == 0):
        reporter.say(texts.show(run, step=step, samples=samples, kl=kl))
    check_guards(run, step=step, savers=savers, reporter=reporter)
    equal = equal_groups(table["reward"], groups=table["prompt"].long(), included=table["included"].bool())
    counts = counted(run, samples=samples, equal=equal[samples.numbers])
    trainer = logprobs_of(run.actor, run=run, samples=samples) if config.rollout.identity == "corrected" else None
    values = values_of(run, samples=samples)
    advantages = generalised_advantages(
        token_rewards(run, samples=samples, log_ratio=log_ratio),
        values=values,
        mask=samples.answer_mask,
        gamma=config.advantage.gamma,
        lam=config.advantage.lam,
    )
    mask = samples.answer_mask & counts.unsqueeze(1)
    extra = {
        "old": samples.logprobs if trainer is None else trainer,
        "values": values,
        "returns": advantages + values,
        "advantages": whitened(run, advantages=advantages, mask=mask)
        if config.advantage.scale == "batch"
        else advantages,
        "weights": weights_of(run, samples=samples, counts=counts),
        "correction": correction_of(run, samples=samples, trainer=trainer),
        "reference": reference if config.kl.place == "loss" else None,
    }
    run.buffer.fill(samples, **{name: value for name, value in extra.items() if value is not None})


def token_rewards(run: Run, *, samples: Samples, log_ratio: Tensor | None) -> Tensor:
    """The reward of an answer at its last token, and the divergence at every token, float32 [S, T]."""
    rewards = torch.zeros_like(samples.logprobs)
    if log_ratio is not None and run.config.kl.place == "reward":
        rewards -= run.config.kl.coef * divergence_of(log_ratio, estimator=run.config.kl.estimator.value)
    last = samples.prompt_lengths + samples.answer_lengths - 1
    rewards[torch.arange(len(samples)), last] += samples.rewards.float()
    return rewards


def divergence_of(log_ratio: Tensor, *, estimator: str) -> Tensor:
    """Per token, from log policy - log reference [S, T]."""
    if estimator == "k1":
        return log_ratio
    return log_ratio.square() / 2 if estimator == "k2" else torch.expm1(-log_ratio) + log_ratio


def values_of(run: Run, *, samples: Samples) -> Tensor:
    """The critic's value before each token, float32 [S, T], without gradients; 0 outside of answers."""
    assert run.critic is not None
    with run.critic.evaluating():
        parts = [
            values_of_states(run.critic, tokens=samples.tokens[rows].to(run.process.device)).cpu()
            for rows in micro_batches(run, samples=samples)
        ]
    return torch.cat(parts) * samples.answer_mask


def whitened(run: Run, *, advantages: Tensor, mask: Tensor) -> Tensor:
    """Advantages less their mean, over their deviation, both over all counted tokens of all ranks."""
    kept = advantages[mask].double()
    own = torch.stack([torch.tensor(float(len(kept)), dtype=torch.float64), kept.sum(), kept.square().sum()])
    count, total, squares = (
        run.process.comm.gather_scalars(own.to(run.process.device), label="whitening").sum(0).tolist()
    )
    mean = total / max(1.0, count)
    deviation = max(0.0, squares / max(1.0, count) - mean * mean) ** 0.5
    return (advantages - mean) / (deviation + 1e-8) * mask


def update_critic(run: Run) -> float:
    """One optimizer step of the critic on the samples of the policy's next one; the mean loss over all ranks."""
    config, engine, device = run.config, run.critic, run.process.device
    assert engine is not None and run.buffer.samples is not None
    rows = update_rows(run)
    samples, extra = run.buffer.samples[rows], {name: value[rows] for name, value in run.buffer.extra.items()}
    scale = run.process.world_size * config.train.accumulation_steps  # the engine divides by as much
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for part in micro_batches(run, samples=samples):
        loss = value_loss(
            values_of_states(engine, tokens=samples.tokens[part].to(device)),
            old=extra["values"][part].to(device),
            returns=extra["returns"][part].to(device),
            clip=config.critic.value_clip,
            weights=extra["weights"][part].to(device),
        )
        engine.backward(loss * scale)
        engine.step()
        total += loss.detach()
    return run.process.comm.gather_scalars(total, label="critic").sum().item()
