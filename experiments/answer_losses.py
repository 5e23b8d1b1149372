"""The policy's loss of a micro-batch of answers, computed from all logits or in chunks if they would be large."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.inference.sample import fp32_logprobs
from ztk.rl.align import Packing, PolicyLoss, policy_loss
from ztk.rl.rollout import Layout, Samples, answer_logits, has_large_logits, hide_of, token_loss
from ztk.rl.rollout.kept import Hide
from ztk.train.engine import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerLosses:
    """loss: weighted sum over tokens, a scalar. logprobs: of the answers, float32 [S, T] without a gradient. clipped: number of tokens
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
