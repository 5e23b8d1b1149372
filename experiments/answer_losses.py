"""The policy's loss of a micro-batch of answers: over all logits, or over chunks of them where all would be large."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.engine import Engine
from ztk.rollout import Answers, Samples, large_answers, token_logprobs
from ztk.rollout.objective import PolicyLoss, policy_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerLosses:
    """loss: the weighted sum over tokens, a scalar. logprobs: of the answers, float32 [S, T] without a gradient. clipped: tokens whose ratio
    lies outside of the clipping range; entropy: the sum over the answers' tokens, float64; scalars."""

    loss: Tensor
    logprobs: Tensor
    clipped: Tensor
    entropy: Tensor


def losses_of(
    engine: Engine,
    *,
    batch: Samples,
    tokens: Tensor,
    policy: PolicyLoss,
    temperature: float,
    **given: Tensor | None,
) -> AnswerLosses:
    """One forward of the policy over `tokens`, int64 [S, T], those of `batch` on the engine's device. given: as `policy_loss` takes, [S, T]."""
    large = large_answers(engine, rows=len(batch), length=tokens.shape[1])
    if large is not None and policy.ratio == "token":  # a ratio of sequences is no function of one token
        return _in_chunks(large, batch=batch, tokens=tokens, policy=policy, temperature=temperature, **given)
    logits = engine(tokens)
    logprobs = token_logprobs(logits, tokens=tokens, temperature=temperature)
    found = policy_loss(logprobs, policy=policy, **given)
    mask = batch.answer_mask.to(logits.device)[:, 1:]
    entropies = _entropies(logits.detach()[:, :-1].float())
    return AnswerLosses(
        loss=found.loss,
        logprobs=logprobs.detach(),
        clipped=found.clipped,
        entropy=(entropies * mask).sum().double(),
    )


def _in_chunks(
    large: Answers, *, batch: Samples, tokens: Tensor, policy: PolicyLoss, temperature: float, **given: Tensor | None
) -> AnswerLosses:
    """Each token's loss is a function of its own log-probability, so its gradient is known as soon as its chunk's logits are."""
    mask = batch.answer_mask
    places = mask.flatten().nonzero().squeeze(1).to(tokens.device)
    picked = {name: None if value is None else value.flatten()[places] for name, value in given.items()}
    logprobs = torch.zeros(tokens.numel(), device=tokens.device)
    clipped, entropy = (torch.zeros((), dtype=torch.float64, device=tokens.device) for _ in range(2))

    def loss_of(chunk: Tensor, cut: slice, logits: Tensor) -> Tensor:
        logprobs[places[cut]] = chunk.detach()
        of_chunk = {name: None if value is None else value[cut].unsqueeze(0) for name, value in picked.items()}
        found = policy_loss(chunk.unsqueeze(0), policy=policy, **of_chunk)
        clipped.add_(found.clipped)
        entropy.add_(_entropies(logits * temperature).sum())
        return found.loss

    loss = large.token_loss(tokens, mask=mask, loss_of=loss_of, temperature=temperature)
    return AnswerLosses(loss=loss, logprobs=logprobs.view_as(tokens), clipped=clipped, entropy=entropy)


@torch.no_grad()
def _entropies(logits: Tensor) -> Tensor:
    """Of softmax(logits), float32 [..., V], in nats: [...]."""
    logprobs = torch.log_softmax(logits, dim=-1)
    return -(logprobs.exp() * logprobs).sum(-1)
