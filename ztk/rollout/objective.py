"""Advantages and the policy's loss over padded rows: S samples of T tokens, and a mask of the tokens that count.

Every function is pure. Sums that go over all samples of a step are taken over given totals, so no loss depends on how samples are divided
over micro-batches and ranks, but for the order of additions.
Rewards, values and log-probabilities are fp32, or all of another floating-point dtype.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.kernels import segment_scan


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """See `policy_loss`. ratio: token, sequence. form: clipped, cispo. average: sequence, tokens, constant.

    kl_coef, kl_estimator: of a divergence in the loss; 0: none. dual_clip: None: none.
    """

    ratio: str = "token"
    form: str = "clipped"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    average: str = "tokens"
    kl_coef: float = 0.0
    kl_estimator: str = "k3_weighted"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLoss:
    """loss: the weighted sum, a float32 scalar. clipped: tokens whose ratio lies outside of the clipping range, a scalar."""

    loss: Tensor
    clipped: Tensor


def group_advantages(rewards: Tensor, *, groups: Tensor, included: Tensor, baseline: str, scale: str) -> Tensor:
    """Rewards against those of the same group: float64 [S], int64 [S], bool [S] -> float64 [S], 0 for samples that are left out.

    baseline: mean (Shao et al. 2024, arXiv 2402.03300), leave_one_out (Ahmadian et al. 2024, arXiv 2402.14740). scale: group divides by the
    group's standard deviation plus 1e-4, batch by that of all advantages, none leaves them.
    """
    numbers = groups.unique(return_inverse=True)[1]
    weight = included.double()
    totals = torch.zeros(int(numbers.max()) + 1, 3, dtype=torch.float64)
    totals.index_add_(0, numbers, torch.stack([weight, weight * rewards, weight * rewards.square()], dim=1))
    count, total, squares = totals[numbers].unbind(1)
    mean = total / count.clamp(min=1)
    if baseline == "leave_one_out":
        others = (count - 1).clamp(min=1)
        advantages = torch.where(count > 1, rewards - (total - rewards) / others, 0.0)
    else:
        advantages = rewards - mean
    if scale == "group":
        deviation = ((squares - count * mean.square()).clamp(min=0) / (count - 1).clamp(min=1)).sqrt()
        advantages = advantages / (deviation + 1e-4)
    advantages = advantages * weight
    if scale == "batch":
        kept = advantages[included]
        advantages = advantages / (kept.std(unbiased=False) + 1e-8 if len(kept) else 1.0)
    return advantages


def equal_groups(rewards: Tensor, *, groups: Tensor, included: Tensor) -> Tensor:
    """bool [S]: all samples of the group that have a reward have the same one."""
    numbers = groups.unique(return_inverse=True)[1]
    size = int(numbers.max()) + 1
    highest = torch.full((size,), -torch.inf, dtype=torch.float64)
    lowest = torch.full((size,), torch.inf, dtype=torch.float64)
    highest = highest.scatter_reduce(0, numbers[included], rewards[included], reduce="amax")
    lowest = lowest.scatter_reduce(0, numbers[included], rewards[included], reduce="amin")
    return (highest <= lowest)[numbers]


def generalised_advantages(rewards: Tensor, *, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """GAE (Schulman et al. 2016, arXiv 1506.02438) over the tokens of `mask`, which are adjacent in a row: [S, T] -> [S, T].

    values: of the state before a token. After the last token the value is 0.
    """
    found = segment_scan(rewards[mask], values[mask], mask.sum(1), gamma=gamma, lam=lam)
    return torch.zeros_like(rewards).masked_scatter_(mask, found)


def divergence(logprobs: Tensor, *, reference: Tensor, old: Tensor, estimator: str) -> Tensor:
    """KL(policy, reference) per token by one of Schulman's estimators (http://joschu.net/blog/kl-approx.html): [S, T] -> [S, T].

    k3_weighted multiplies k3 by the ratio to the policy that drew the token, so that its gradient is that of the divergence.
    """
    log_ratio = logprobs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    k3 = torch.expm1(-log_ratio) + log_ratio
    return k3 * (logprobs - old).exp() if estimator == "k3_weighted" else k3


def token_weights(mask: Tensor, *, average: str, samples: int, tokens: int, max_tokens: int) -> Tensor:
    """The weight of every token in the mean over all ranks: bool [S, T] -> float32 [S, T].

    samples, tokens: those that count in the step over all ranks. average: see `PolicyLoss`.
    """
    weights = mask.float()
    if average == "tokens":
        return weights / max(1, tokens)
    if average == "constant":
        return weights / (max(1, samples) * max_tokens)
    return weights / weights.sum(1, keepdim=True).clamp(min=1) / max(1, samples)


def policy_loss(
    logprobs: Tensor,
    *,
    policy: PolicyLoss,
    old: Tensor,
    advantages: Tensor,
    weights: Tensor,
    correction: Tensor | None = None,
    reference: Tensor | None = None,
) -> TokenLoss:
    """The loss to minimise: logprobs, old, advantages, weights [S, T] -> the sum over tokens of weight times token loss.

    correction: a further weight per token, [S, T]. reference: log-probabilities of the reference [S, T], for a divergence in the loss.
    """
    mask = weights > 0
    log_ratio = torch.where(mask, logprobs - old, 0.0)
    if policy.ratio == "sequence":  # arXiv 2507.18071: the geometric mean over the answer
        log_ratio = (log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).expand_as(log_ratio)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - policy.clip_low, 1 + policy.clip_high)
    if policy.form == "cispo":  # arXiv 2506.13585
        losses = -clipped.detach() * advantages * logprobs
    else:
        losses = -torch.minimum(ratio * advantages, clipped * advantages)
        if policy.dual_clip is not None:  # arXiv 1912.09729
            losses = torch.where(advantages < 0, torch.minimum(losses, -policy.dual_clip * advantages), losses)
    if correction is not None:
        losses = losses * correction
    if policy.kl_coef and reference is not None:
        losses = losses + policy.kl_coef * divergence(
            logprobs, reference=reference, old=old, estimator=policy.kl_estimator
        )
    loss = (torch.where(mask, losses, 0.0) * weights).sum()
    return TokenLoss(loss=loss, clipped=((ratio != clipped) & mask).sum())


def value_loss(values: Tensor, *, old: Tensor, returns: Tensor, clip: float, weights: Tensor) -> Tensor:
    """Half the squared error of values, which may move by `clip` from the old ones (0: freely): [S, T] each -> a weighted sum."""
    error = (values - returns).square()
    if clip:
        error = torch.maximum(error, (old + (values - old).clamp(-clip, clip) - returns).square())
    return (error * weights).sum() / 2
