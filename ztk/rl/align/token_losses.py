"""Losses of policy and critic over the tokens of packed answers: T tokens of S answers, one answer after another.

Every function is pure. Means over all answers of a step use given totals, so apart from the order of additions, no loss depends on how
answers are distributed over micro-batches, packs and ranks.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ztk.core.policies.align import DistillPolicy
from ztk.rl.align.sequences import segment_sums


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """See `policy_loss`. ratio: token, sequence. form: clipped, cispo. average: sequence, tokens, constant.

    kl_coef, kl_estimator: weight and estimator of a divergence in the loss; a weight of 0 disables it. dual_clip: disabled by default.
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
    """loss: the weighted sum, a float32 scalar. clipped: number of tokens whose ratio is outside the clipping range, a scalar."""

    loss: Tensor
    clipped: Tensor


def policy_loss(
    logprobs: Tensor,
    *,
    policy: PolicyLoss,
    old: Tensor,
    advantages: Tensor,
    weights: Tensor,
    lengths: Tensor | None = None,
    correction: Tensor | None = None,
    reference: Tensor | None = None,
) -> TokenLoss:
    """Returns the loss to minimise: logprobs, old, advantages, weights of packed answers, float32 or float64 [T] -> the sum over tokens
    of weight times token loss.

    lengths: one per answer, int64 [S], for policy.ratio=sequence. correction: a further weight per token, [T]. reference:
    log-probabilities of the reference [T], for a divergence in the loss.
    """
    mask = weights > 0
    log_ratio = torch.where(mask, logprobs - old, 0.0)
    if policy.ratio == "sequence":  # arXiv 2507.18071: the geometric mean over the answer
        assert lengths is not None, "a ratio of sequences needs their lengths"
        means = segment_sums(log_ratio, lengths=lengths) / lengths.clamp(min=1)
        log_ratio = means.repeat_interleave(lengths, output_size=len(log_ratio))
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


def divergence(logprobs: Tensor, *, reference: Tensor, old: Tensor, estimator: str) -> Tensor:
    """Estimates KL(policy, reference) per token with one of Schulman's estimators (http://joschu.net/blog/kl-approx.html): tensors of the
    same shape, such as [T], and floating-point dtype -> the same.

    k3_weighted multiplies k3 by the ratio to the sampling policy, which makes its gradient unbiased.
    """
    log_ratio = logprobs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    k3 = torch.expm1(-log_ratio) + log_ratio
    return k3 * (logprobs - old).exp() if estimator == "k3_weighted" else k3


def token_weights(
    lengths: Tensor, *, counts: Tensor, average: str, samples: int, tokens: int, max_tokens: int
) -> Tensor:
    """Returns the weight of every token of packed answers in the mean over all ranks: float32 [T]. T is the sum of `lengths`, int64 [S].

    counts: whether an answer counts, bool [S]. samples, tokens: counted ones in the step over all ranks. average: tokens gives equal
    weight to all tokens; sequence gives equal weight to all answers and to the tokens of an answer; constant gives each token 1 /
    (samples * max_tokens).
    """
    if average == "tokens":
        own = torch.full(lengths.shape, 1 / max(1, tokens))
    elif average == "constant":
        own = torch.full(lengths.shape, 1 / (max(1, samples) * max_tokens))
    else:
        own = 1 / lengths.clamp(min=1).float() / max(1, samples)
    return (own * counts).repeat_interleave(lengths)


def value_loss(values: Tensor, *, old: Tensor, returns: Tensor, clip: float, weights: Tensor) -> Tensor:
    """Returns half the squared error of values: [T] each, or another shape, float32 or float64 -> a weighted sum, a scalar.

    clip: largest change from the old values; 0 for no limit.
    """
    error = (values - returns).square()
    if clip:
        error = torch.maximum(error, (old + (values - old).clamp(-clip, clip) - returns).square())
    return (error * weights).sum() / 2


# Generalised knowledge distillation: a loss between the next-token distributions of student and teacher (Agarwal et al. 2023, arXiv
# 2306.13649).


def distill_losses(student: Tensor, *, teacher: Tensor, policy: DistillPolicy) -> Tensor:
    """Returns the divergence of every token in nats, from logits [N, V] of both: [N] in float32, float64 for float64.

    With m = (1 - beta) student + beta teacher it is beta KL(teacher, m) + (1 - beta) KL(student, m).
    """
    own, theirs = (_logprobs(logits, temperature=policy.temperature) for logits in (student, teacher))
    if policy.beta == 0:
        return _divergence(theirs, own)
    if policy.beta == 1:
        return _divergence(own, theirs)
    mixed = torch.logaddexp(own + math.log1p(-policy.beta), theirs + math.log(policy.beta))
    return policy.beta * _divergence(theirs, mixed) + (1 - policy.beta) * _divergence(own, mixed)


def _logprobs(logits: Tensor, *, temperature: float) -> Tensor:
    precise = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(precise if temperature == 1.0 else precise / temperature, dim=-1)


def _divergence(first: Tensor, second: Tensor) -> Tensor:
    """Returns KL(first, second) of log-probabilities [N, V]: [N]."""
    return (first.exp() * (first - second)).sum(-1)


# The largest reward for a given divergence, in closed form, for prompts with one right answer.


class Frontier:
    """The best mean reward for a mean divergence from a first policy, and the least divergence for a mean reward.

    Among all policies with a given divergence, the best is the first policy tilted by exp(reward / beta) (Korbak et al. 2022, arXiv
    2205.11275). Let one answer to a prompt have reward 1 and all others 0, and p be its probability under the first policy. The tilted
    probability is q = p e / (p e + 1 - p), e = exp(1 / beta), and the divergence is q log(q / p) + (1 - q) log((1 - q) / (1 - p)). Both
    are averaged over prompts.
    """

    def __init__(self, right: Tensor) -> None:
        """right: p of each prompt, float32 or float64 [P].

        Raises:
            ValueError: a probability outside (0, 1): no divergence changes it, or none is needed.
        """
        if not bool(((right > 0) & (right < 1)).all()):
            raise ValueError("the probability of a right answer is 0 or 1: give the first policy warm_start steps")
        inverse = torch.linspace(0, 40, 4001, dtype=torch.float64)  # of beta
        logits = torch.logit(right.double()).unsqueeze(1) + inverse
        tilted, p = torch.sigmoid(logits), right.double().unsqueeze(1)
        others = logsigmoid(-logits) - torch.log1p(-p)  # log((1 - q) / (1 - p)), without cancellation
        kl = tilted * (logsigmoid(logits) - p.log()) + (1 - tilted) * others
        self.kl, self.reward = kl.mean(0).clamp(min=0.0), tilted.mean(0)  # float64 [4001] each, increasing

    def most(self, kl: float) -> float:
        """Returns the largest reward for a divergence in nats. A noisy estimate below 0 is taken as 0."""
        return _between(max(kl, 0.0), given=self.kl, found=self.reward)

    def least(self, reward: float) -> float:
        """Returns the least divergence in nats for a reward; 0 for one that the first policy has."""
        return _between(max(reward, float(self.reward[0])), given=self.reward, found=self.kl)


def _between(value: float, *, given: Tensor, found: Tensor) -> float:
    """Interpolates `found` linearly at the point where the increasing `given` is `value`."""
    index = int(torch.searchsorted(given, torch.tensor(value, dtype=torch.float64)).clamp(1, len(given) - 1))
    first, second = float(given[index - 1]), float(given[index])
    share = min(1.0, (value - first) / max(second - first, 1e-300))
    return float(found[index - 1] + share * (found[index] - found[index - 1]))
