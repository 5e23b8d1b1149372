"""Trains a policy with a critic (PPO): the program of every rank of `task=ppo`. The loop and the policy's update are in `grpo`."""

from dataclasses import replace

import torch
from torch import Tensor

from ztk.config import Config
from ztk.experiments.grpo import Update, fill_buffer, run_task, update_policy, update_rows
from ztk.experiments.models import values_of_states
from ztk.experiments.policy_losses import counted
from ztk.experiments.policy_run import Run
from ztk.experiments.ranks import started
from ztk.experiments.rollouts import Scored, micro_batches
from ztk.parallel.pipeline import MicroBatch
from ztk.rl.align import Packing, generalised_advantages, value_loss
from ztk.rl.rollout import Samples


def main(config: Config) -> None:
    """Runs one rank from start to end. Raises as `run_task`."""
    with started(config) as process:
        run_task(config, process=process, fill=fill, update=update)


def fill(run: Run, scored: Scored) -> None:
    """Computes the advantage of a token: the excess of its future reward over the critic's expectation (GAE)."""
    config, samples = run.config, scored.samples
    counts = counted(run, scored=scored)
    values = values_of(run, samples=samples)
    packing, length = Packing.of(samples.answer_mask), samples.tokens.shape[1]
    packed = generalised_advantages(
        packing.pack(token_rewards(scored)),
        values=packing.pack(values),
        lengths=packing.lengths,
        gamma=config.advantage.gamma,
        lam=config.advantage.lam,
    )
    advantages = packing.unpack(packed, length=length)
    returns = advantages + values
    if config.advantage.scale == "batch":
        advantages = whitened(run, advantages=advantages, mask=samples.answer_mask & counts.unsqueeze(1))
    fill_buffer(run, scored=scored, counts=counts, advantages=advantages, values=values, returns=returns)


def update(run: Run) -> Update:
    """Runs one optimizer step of the critic and one of the policy, on the same samples."""
    critic_loss = update_critic(run)
    updated = update_policy(run)
    return replace(updated, metrics={"critic_loss": critic_loss, **updated.metrics})


def token_rewards(scored: Scored) -> Tensor:
    """Returns the reward of an answer at its last token, less the penalty at every token, float32 [S, T]."""
    samples = scored.samples
    rewards = torch.zeros_like(samples.logprobs) if scored.penalty is None else -scored.penalty
    last = samples.prompt_lengths + samples.answer_lengths - 1
    rewards[torch.arange(len(samples)), last] += samples.rewards.float()
    return rewards


def values_of(run: Run, *, samples: Samples) -> Tensor:
    """Returns the critic's value before each token, float32 [S, T], without gradients; 0 outside answers."""
    assert run.critic is not None
    with run.critic.evaluating():
        parts = run.critic.compute(
            values_of_states(run.critic, samples=samples[rows]) for rows in micro_batches(run, samples=samples)
        )
    return Packing.of(samples.answer_mask).unpack(
        torch.cat([part.cpu() for part in parts]), length=samples.tokens.shape[1]
    )


def whitened(run: Run, *, advantages: Tensor, mask: Tensor) -> Tensor:
    """Normalizes advantages by mean and deviation over all counted tokens of all ranks."""
    kept = advantages[mask].double()
    own = torch.stack([torch.tensor(float(len(kept)), dtype=torch.float64), kept.sum(), kept.square().sum()])
    count, total, squares = (
        run.process.mesh.gather_scalars(own.to(run.process.device), label="whitening").sum(0).tolist()
    )
    mean = total / max(1.0, count)
    deviation = max(0.0, squares / max(1.0, count) - mean * mean) ** 0.5
    return (advantages - mean) / (deviation + 1e-8) * mask


def update_critic(run: Run) -> float:
    """Runs one optimizer step of the critic on the samples of the policy's next step. Returns the mean loss over all ranks."""
    config, engine, device = run.config, run.critic, run.process.device
    assert engine is not None and run.buffer.samples is not None
    rows = update_rows(run)
    samples, extra = run.buffer.samples[rows], {name: value[rows] for name, value in run.buffer.extra.items()}
    scale = run.process.mesh.replicas * config.train.accumulation_steps  # compensates for the engine's division
    total = torch.zeros(1, dtype=torch.float64, device=device)

    def forward_of(part: slice) -> MicroBatch:
        batch = samples[part]
        packing = Packing.of(batch.answer_mask, device=device)
        given = {name: packing.pack(extra[name][part].to(device)) for name in ("values", "returns", "weights")}

        def loss_of(values: Tensor) -> Tensor:
            loss = value_loss(
                values,
                old=given["values"],
                returns=given["returns"],
                clip=config.critic.value_clip,
                weights=given["weights"],
            )
            total.add_(loss.detach())
            return loss * scale

        return values_of_states(engine, samples=batch, then=loss_of)

    engine.train_batch(forward_of(part) for part in micro_batches(run, samples=samples))
    return run.process.mesh.gather_scalars(total, label="critic").sum().item()
