"""The policy's update of `task=grpo` and `task=ppo`: from scored samples to an optimizer step."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ztk.config import Config
from ztk.experiments.answer_losses import losses_of
from ztk.experiments.rollout_run import Run
from ztk.experiments.rollouts import Scored, layout_of, logprobs_of, micro_batches
from ztk.parallel.pipeline import MicroBatch
from ztk.rl.align import Mismatch, Packing, PolicyLoss, importance_weights, mismatch_sums, token_weights
from ztk.rl.rollout import (
    Difference,
    RolloutMismatch,
    Samples,
    compare,
    first_layer,
    same_experts,
)


def counted(run: Run, *, scored: Scored) -> Tensor:
    """Returns which of this rank's samples count in the loss, bool [S]."""
    samples = scored.samples
    counts = samples.included.clone()
    if run.config.rollout.drop_equal_groups:
        counts &= ~scored.equal_groups[samples.numbers]
    if run.config.rollout.mask_truncated:
        counts &= samples.finished
    return counts


def fill_buffer(run: Run, *, scored: Scored, counts: Tensor, advantages: Tensor, **extra: Tensor) -> None:
    """Starts the updates with a rollout. counts: whether a sample counts, bool [S]. advantages: per token, float32 [S, T]. extra: [S, T]
    each.
    """
    config, samples = run.config, scored.samples
    values = {
        "old": samples.logprobs,
        "advantages": advantages,
        "weights": weights_of(run, samples=samples, counts=counts),
    }
    if config.rollout.identity == "corrected":
        values["old"] = trainer = rescored(run, samples=samples)
        values["correction"] = corrected(run, samples=samples, trainer=trainer)
    if config.kl.coef and config.kl.place == "loss" and scored.reference is not None:
        values["reference"] = scored.reference
    run.buffer.fill(samples, **values, **extra)


def rescored(run: Run, *, samples: Samples) -> Tensor:
    """Returns the trainer's log-probabilities, float32 [S, T]. A collective call.

    If the samples have the experts that drew them, adds the fraction of tokens whose routers choose the same to the run's metrics.
    """
    routers = run.routers
    with nullcontext([]) if routers is None else routers.recorded() as found:
        trainer = logprobs_of(run.actor, run=run, samples=samples, routers=routers)
    assert trainer is not None
    if samples.experts is None:
        return trainer
    layers, same = samples.experts.shape[2], 0
    for number, rows in enumerate(micro_batches(run, samples=samples)):
        batch = samples[rows]
        own = found[number * layers : (number + 1) * layers]
        same += same_experts(batch, layout=layout_of(run, samples=batch), found=own)
    sums = torch.tensor([same, int(samples.answer_mask.sum())], dtype=torch.float64, device=run.process.device)
    same, tokens = run.process.mesh.gather_scalars(sums, label="experts").sum(0).tolist()
    run.metrics["rollout_experts"] = same / max(1.0, tokens)
    return trainer


def corrected(run: Run, *, samples: Samples, trainer: Tensor) -> Tensor:
    """Returns the weights of rollout.identity=corrected, float32 [S, T]. A collective call.

    Adds the mismatch between the trainer's and the sampler's log-probabilities to the run's metrics. trainer: the trainer's
    log-probabilities, [S, T].
    """
    rollout, given = run.config.rollout, {"drawn": samples.logprobs, "mask": samples.answer_mask}
    assert rollout.correction is not None and rollout.correction_max is not None, "the configuration is checked"
    sums = mismatch_sums(trainer, **given).to(run.process.device)
    found = Mismatch.of(run.process.mesh.gather_scalars(sums, label="mismatch").sum(0))
    run.metrics |= {f"rollout_{name}": value for name, value in asdict(found).items()}
    return importance_weights(trainer, form=rollout.correction.value, most=rollout.correction_max, **given)


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """loss: this rank's mean over its micro-batches; the mean over ranks is the step's loss. entropy: nats per token, over all ranks.

    tokens: of prompts and answers, over all ranks. metrics: further values of the step's row, such as `clipped`, the fraction of tokens
    outside the clipping range.
    """

    loss: Tensor
    entropy: float
    tokens: int
    metrics: Mapping[str, float]


def update_rows(run: Run) -> slice:
    """Returns the rows of this rank's samples for the next optimizer step."""
    share = run.config.train.global_batch_size // run.process.mesh.replicas
    return slice(run.buffer.position * share, (run.buffer.position + 1) * share)


def update_policy(run: Run) -> Update:
    """Runs one optimizer step of the policy. Raises RolloutMismatch if rollout.identity=exact is violated."""
    config, engine, device = run.config, run.actor, run.process.device
    assert run.buffer.samples is not None
    rows = update_rows(run)
    samples, extra = run.buffer.samples[rows], {name: value[rows] for name, value in run.buffer.extra.items()}
    policy = loss_of(config)
    scale = run.process.mesh.replicas * config.train.accumulation_steps  # compensates for the engine's division
    sums = torch.zeros(4, dtype=torch.float64)
    batches = [samples[part] for part in micro_batches(run, samples=samples)]
    logprobs: list[Tensor] = []  # of each micro-batch, on ranks that compute losses

    def forward_of(number: int, part: slice) -> MicroBatch:
        batch, own = batches[number], {name: value[part].to(device) for name, value in extra.items()}
        given = {name: own.get(name) for name in ("old", "advantages", "weights", "correction", "reference")}
        layout = layout_of(run, samples=batch)
        options = {"layout": layout, "temperature": config.rollout.temperature}

        def scaled_loss(model: Any) -> Tensor:
            if run.routers is not None:
                run.routers.begin(batch, layout=layout)
            found = losses_of(model, batch=batch, policy=policy, **options, **given)
            logprobs.append(found.logprobs)
            counts = torch.stack([found.entropy, found.clipped.double()]).cpu()
            answered, computed = int(batch.answer_mask.sum()), int(batch.lengths.sum())
            sums.add_(torch.tensor([counts[0], answered, counts[1], computed], dtype=torch.float64))
            return found.loss * scale

        return layout.micro_batch(scaled_loss)

    def check() -> None:
        if run.buffer.position == 0:  # on policy: the weights have not changed since the rollout
            run.metrics["rollout_differing"] = compared(run, batches=batches, logprobs=logprobs)

    parts = enumerate(micro_batches(run, samples=samples))
    loss = engine.train_batch((forward_of(number, part) for number, part in parts), before_step=check)
    if run.routers is not None:
        run.routers.begin(None)
    totals = run.process.mesh.gather_scalars(sums.to(device), label="update").sum(0).tolist()
    entropy, tokens, clipped, computed = totals
    return Update(
        loss=loss,
        entropy=entropy / max(1.0, tokens),
        tokens=int(computed),
        metrics={"clipped": clipped / max(1.0, tokens)},
    )


def compared(run: Run, *, batches: Sequence[Samples], logprobs: Sequence[Tensor]) -> int:
    """Returns the number of log-probabilities that differ from the stored ones, over all ranks and micro-batches. A collective call.

    logprobs: of the micro-batches, on ranks that compute losses.

    With rollout.identity=exact it raises RolloutMismatch on the ranks of a replica with a difference.
    """
    process = run.process
    found = [compare(batch, logprobs=own) for batch, own in zip(batches, logprobs, strict=False)]
    found += [Difference(count=0)] * (len(batches) - len(found))
    own = torch.tensor([[one.count, one.row, one.position] for one in found], dtype=torch.float64)
    ranks = process.mesh.gather_scalars(own.flatten().to(process.device), label="differing").cpu()
    ranks = ranks.view(process.mesh.replicas, len(batches), 3).long()
    total = int(ranks[:, :, 0].sum())
    if not total or run.config.rollout.identity != "exact":
        return total
    first = int(ranks[:, :, 0].sum(0).nonzero()[0])
    count, row, position = ranks[process.mesh.replica, first].tolist()
    layer = first_layer(run.actor, samples=batches[first], packs=run.packs, row=row, position=position)
    if count:
        raise RolloutMismatch(
            f"step {run.actor.global_steps + 1}: {count} log-probabilities of a micro-batch differ from its rollout; the first: "
            f"{found[first].first or 'on another rank'}; {layer}. Use rollout.identity=corrected, and report this"
        )
    return total


def loss_of(config: Config) -> PolicyLoss:
    """Returns the loss of `policy` and `kl`."""
    policy, kl = config.policy, config.kl
    return PolicyLoss(
        ratio=policy.ratio,
        form=policy.form,
        clip_low=policy.clip_low,
        clip_high=policy.clip_high,
        dual_clip=policy.dual_clip,
        average=policy.average,
        kl_coef=kl.coef if kl.place == "loss" else 0.0,
        kl_estimator=kl.estimator.value if kl.estimator else "k3_weighted",
    )


def weights_of(run: Run, *, samples: Samples, counts: Tensor) -> Tensor:
    """Returns the weight of each token in the loss of its update, float32 [S, T]. counts: whether the sample counts, bool [S]."""
    packing, length = Packing.of(samples.answer_mask), samples.tokens.shape[1]
    share = run.config.train.global_batch_size // run.process.mesh.replicas
    tokens = (packing.lengths * counts).view(-1, share).sum(1)
    own = torch.stack([counts.view(-1, share).sum(1), tokens]).double()
    totals = run.process.mesh.gather_scalars(own.to(run.process.device), label="tokens").sum(0).cpu()
    parts = [
        token_weights(
            packing.lengths[update * share : (update + 1) * share],
            counts=counts[update * share : (update + 1) * share],
            average=run.config.policy.average,
            samples=int(totals[0, update]),
            tokens=int(totals[1, update]),
            max_tokens=run.config.rollout.max_tokens,
        )
        for update in range(run.buffer.updates)
    ]
    return packing.unpack(torch.cat(parts), length=length)
