"""The loss of a policy's answers: its tokens' weights, its correction for other log-probabilities, and one micro-batch.

The loss is computed from all logits, or in chunks if they would be large.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ztk.config import Config
from ztk.experiments.policy_run import Run
from ztk.experiments.rollouts import Scored, layout_of, logprobs_of, micro_batches
from ztk.inference.sample import fp32_logprobs
from ztk.rl.align import Mismatch, Packing, PolicyLoss, importance_weights, mismatch_sums, policy_loss, token_weights
from ztk.rl.rollout import (
    Difference,
    Layout,
    RolloutMismatch,
    Samples,
    answer_logits,
    compare,
    first_layer,
    has_large_logits,
    hide_of,
    same_experts,
    token_loss,
)
from ztk.rl.rollout.kept import Hide
from ztk.train.engine import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerLosses:
    """loss: weighted sum over tokens, a scalar. logprobs: the answers', float32 [S, T] without a gradient. clipped: number of tokens
    whose ratio is outside the clipping range. entropy: sum over the answers' tokens. The last two are float64 scalars.
    """

    loss: Tensor
    logprobs: Tensor
    clipped: Tensor
    entropy: Tensor


def losses_of(
    engine: Engine,
    *,
    batch: Samples,
    layout: Layout,
    policy: PolicyLoss,
    temperature: float,
    **given: Tensor | None,
) -> AnswerLosses:
    """Runs one forward of the policy over the texts of `batch` in `layout`.

    given: optional arguments of `policy_loss`, but as rows [S, T].
    """
    device, length = layout.tokens.device, batch.tokens.shape[1]
    mask = batch.answer_mask
    packing = Packing.of(mask, device=device)
    packed = {name: None if value is None else packing.pack(value) for name, value in given.items()}
    hide = hide_of(batch.kept, mask=mask, device=device)
    # A sequence's ratio depends on all of its tokens.
    if policy.ratio == "token" and has_large_logits(engine, tokens=mask.numel()):
        options = {"packing": packing, "length": length, "policy": policy, "temperature": temperature, "hide": hide}
        return _in_chunks(engine, layout=layout, mask=mask, **options, **packed)
    logits = answer_logits(engine, layout=layout, mask=mask)
    chosen = layout.tokens.flatten().index_select(0, layout.places(mask)).unsqueeze(1)
    seen = logits if hide is None else hide(logits, slice(0, len(logits)))
    every = fp32_logprobs(seen, temperature=temperature)
    logprobs = every.gather(1, chosen).squeeze(1)
    found = policy_loss(logprobs, policy=policy, lengths=packing.lengths, **packed)
    return AnswerLosses(
        loss=found.loss,
        logprobs=packing.unpack(logprobs.detach(), length=length),
        clipped=found.clipped,
        entropy=_entropies(every if temperature == 1.0 and hide is None else fp32_logprobs(logits, temperature=1.0))
        .sum()
        .double(),
    )


def _in_chunks(
    engine: Engine,
    *,
    layout: Layout,
    mask: Tensor,
    packing: Packing,
    length: int,
    policy: PolicyLoss,
    temperature: float,
    hide: Hide | None,
    **packed: Tensor | None,
) -> AnswerLosses:
    """Computes the loss in chunks.

    A token's loss depends only on its own log-probability, so its gradient can be computed with its chunk.
    """
    places, device = packing.places, packing.places.device
    logprobs = torch.zeros(len(places), device=device)
    clipped, entropy = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))

    def loss_of(chunk: Tensor, cut: slice, logits: Tensor) -> Tensor:
        logprobs[cut] = chunk.detach()
        of_chunk = {name: None if value is None else value[cut] for name, value in packed.items()}
        found = policy_loss(chunk, policy=policy, **of_chunk)
        clipped.add_(found.clipped)
        entropy.add_(_entropies(fp32_logprobs(logits * temperature, temperature=1.0)).sum())
        return found.loss

    loss = token_loss(engine, layout=layout, mask=mask, loss_of=loss_of, temperature=temperature, hide=hide)
    rows = packing.unpack(logprobs, length=length)
    return AnswerLosses(loss=loss, logprobs=rows, clipped=clipped, entropy=entropy)


@torch.no_grad()
def _entropies(logprobs: Tensor) -> Tensor:
    """Returns the entropies of log-probabilities, float32 [..., V], in nats: [...]."""
    return -(logprobs.exp() * logprobs).sum(-1)


def counted(run: Run, *, scored: Scored) -> Tensor:
    """Returns which of this rank's samples count in the loss, bool [S]."""
    samples = scored.samples
    counts = samples.included.clone()
    if run.config.rollout.drop_equal_groups:
        counts &= ~scored.equal_groups[samples.numbers]
    if run.config.rollout.mask_truncated:
        counts &= samples.finished
    return counts


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


def compared(run: Run, *, batches: Sequence[Samples], logprobs: Sequence[Tensor]) -> int:
    """Returns the number of log-probabilities that differ from the stored ones, over all ranks and micro-batches. A collective call.

    logprobs: one per micro-batch, on ranks that compute losses.

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
