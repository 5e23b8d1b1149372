"""Assignment of tokens to experts with a capacity: DeepSpeed's top-1, top-2 and top-k.

T tokens, E experts, k choices. An expert takes at most max(ceil(T / E * k * factor), min_capacity) tokens. Choices beyond that are dropped:
their weight is zero, and the residual connection around the layer carries the token on. All computation is on [T, E]. Random numbers
come from torch's own generator in DeepSpeed's order, so that the same seed gives the same choices. Tensor-parallel ranks have the same
tokens and use their first rank's random numbers, so their choices agree.

Lepikhin et al. 2020 (GShard), https://arxiv.org/abs/2006.16668; random token selection: Kim et al. 2021, https://arxiv.org/abs/2109.10465
Results have the dtype of x.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_JITTER = 1e-2  # inputs are multiplied by 1 plus or minus this


@dataclass(frozen=True, kw_only=True, slots=True)
class GatePolicy:
    """Routing options; see the arguments of `ztk.parallel.moe.MoE`."""

    k: int
    capacity_factor: float
    eval_capacity_factor: float
    min_capacity: int
    noise: str | None
    drop_tokens: bool
    random_selection: bool
    sample_second: bool

    def capacity(self, *, tokens: int, experts: int, training: bool) -> int:
        """Number of `tokens` that each expert takes. In float32 as in DeepSpeed: 10 * 1.1 is 11 there and above 11 in float64."""
        factor = self.capacity_factor if training else self.eval_capacity_factor
        scaled = tokens / experts * torch.tensor(factor * self.k, dtype=torch.float32)
        return max(int(scaled.ceil()), self.min_capacity)


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """The experts and places of tokens. A dropped choice has kept False and weight 0."""

    experts: Tensor  # int64 [T, k], best first
    places: Tensor  # int64 [T, k], from 0 to below capacity where kept
    kept: Tensor  # bool [T, k]
    weights: Tensor  # float32 [T, k], differentiable
    l_aux: Tensor  # float32 scalar, differentiable
    exp_counts: Tensor  # int64 [E], choices per expert before any was dropped
    capacity: int


def uniform(like: Tensor) -> Tensor:
    """Uniform float32 numbers in [0, 1) from torch's default generator, in the shape of `like`."""
    return torch.rand(like.shape, device=like.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gating:
    """Inputs of the assignment other than the logits. used_token: [T], 0 for tokens that go to no expert; for k=1 only.

    largest_load: choices per expert, int64 [E] -> the capacity that suffices on every rank; called if nothing is dropped.
    uniform: float32 random numbers of the shape and on the device of its argument, from 0 to below 1.
    """

    policy: GatePolicy
    training: bool
    largest_load: Callable[[Tensor], int]
    uniform: Callable[[Tensor], Tensor] = uniform
    used_token: Tensor | None = None

    def capacity(self, logits: Tensor, *, counts: Tensor) -> int:
        """Number of tokens that each expert takes. logits: [T, E]. counts: choices per expert, int64 [E]."""
        if not self.policy.drop_tokens:
            return self.largest_load(counts)
        return self.policy.capacity(tokens=logits.shape[0], experts=logits.shape[1], training=self.training)


def jitter(x: Tensor, *, uniform: Callable[[Tensor], Tensor]) -> Tensor:
    """x times a random number close to one, element by element."""
    low, high = torch.tensor(1.0 - _JITTER), torch.tensor(1.0 + _JITTER)
    return x * (low + uniform(x) * (high - low))


def assign(logits: Tensor, *, gating: Gating) -> Assignment:
    """logits: float32 [T, E].

    Raises ValueError for `used_token` with another k than 1.
    """
    if gating.policy.k == 1:
        return _top1(logits, gating=gating)
    if gating.used_token is not None:
        raise ValueError(f"used_token works with k=1 only (have k={gating.policy.k}), as in DeepSpeed; leave it out")
    return _top2(logits, gating=gating) if gating.policy.k == 2 else _topk(logits, gating=gating)


def _top1(logits: Tensor, *, gating: Gating) -> Assignment:
    """The weight is the probability. Beyond the capacity, random tokens are kept; without random selection, the first ones."""
    policy, gates = gating.policy, logits.softmax(dim=1)
    noisy = policy.noise == "RSample" and gating.training
    chosen = (logits + _gumbel(logits, uniform=gating.uniform) if noisy else gates).argmax(dim=1, keepdim=True)
    mask = _one_hot(chosen[:, 0], like=gates)
    if gating.used_token is not None:
        mask = mask * gating.used_token.to(mask.dtype)[:, None]
    counts = mask.sum(dim=0)
    capacity = gating.capacity(logits, counts=counts)
    if policy.random_selection:
        priority = mask * gating.uniform(mask)
        winners = priority.topk(min(capacity, mask.shape[0]), dim=0).indices
        kept = mask * torch.zeros_like(mask).scatter_(0, winners, 1)
    else:
        kept = mask * (_places(mask) < capacity)
    kept_choice = kept.gather(1, chosen)
    return Assignment(
        experts=chosen,
        places=_places(kept).gather(1, chosen),
        kept=kept_choice.bool(),
        weights=gates.gather(1, chosen) * kept_choice,
        l_aux=_balance(gates, mask=mask),
        exp_counts=counts,
        capacity=capacity,
    )


def _top2(logits: Tensor, *, gating: Gating) -> Assignment:
    """The second choice is the next best, or sampled among the others; first choices fill an expert before second ones."""
    gates = logits.softmax(dim=1)
    first = gates.argmax(dim=1)
    first_mask = _one_hot(first, like=gates)
    scores = logits + _gumbel(logits, uniform=gating.uniform) if gating.policy.sample_second else logits
    second = scores.masked_fill(first_mask.bool(), float("-inf")).argmax(dim=1)
    second_mask = _one_hot(second, like=gates)
    counts = (first_mask + second_mask).sum(dim=0)
    capacity = gating.capacity(logits, counts=counts)
    chosen = torch.stack([first, second], dim=1)
    second_places = _places(second_mask) + first_mask.sum(dim=0)
    places = torch.cat([_places(first_mask).gather(1, chosen[:, :1]), second_places.gather(1, chosen[:, 1:])], dim=1)
    kept = places < capacity
    return Assignment(
        experts=chosen,
        places=places,
        kept=kept,
        weights=_normalised(gates.gather(1, chosen) * kept),
        l_aux=_balance(gates, mask=first_mask),
        exp_counts=counts,
        capacity=capacity,
    )


def _topk(logits: Tensor, *, gating: Gating) -> Assignment:
    """Each expert keeps the tokens with the highest probabilities, up to its capacity."""
    gates = logits.softmax(dim=1)
    values, chosen = gates.topk(gating.policy.k, dim=1)
    mask = torch.zeros_like(gates, dtype=torch.int64).scatter_(1, chosen, 1)
    counts = mask.sum(dim=0)
    capacity = gating.capacity(logits, counts=counts)
    kept = mask
    if gating.policy.drop_tokens:
        wanted = torch.zeros_like(gates).scatter(1, chosen, values.detach())
        winners = wanted.topk(min(capacity, gates.shape[0]), dim=0, sorted=False).indices
        kept = mask * torch.zeros_like(mask).scatter_(0, winners, 1)
    kept_choice = kept.gather(1, chosen)
    return Assignment(
        experts=chosen,
        places=_places(kept).gather(1, chosen),
        kept=kept_choice.bool(),
        weights=_normalised(values * kept_choice),
        l_aux=_balance(gates, mask=mask) / gating.policy.k,
        exp_counts=counts,
        capacity=capacity,
    )


def _one_hot(chosen: Tensor, *, like: Tensor) -> Tensor:
    """int64 [T, E]."""
    return F.one_hot(chosen, num_classes=like.shape[1])


def _places(mask: Tensor) -> Tensor:
    """Number of earlier tokens that chose the same expert: int64 [T, E], -1 or more."""
    return mask.cumsum(dim=0) - 1


def _balance(gates: Tensor, *, mask: Tensor) -> Tensor:
    """E * sum over experts of (mean probability * share of tokens), a float32 scalar."""
    return (gates.mean(dim=0) * mask.float().mean(dim=0)).sum() * gates.shape[1]


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(dim=1, keepdim=True).clamp_min(torch.finfo(weights.dtype).eps)


def _gumbel(like: Tensor, *, uniform: Callable[[Tensor], Tensor]) -> Tensor:
    """Standard Gumbel numbers, from one uniform number each as `torch.distributions.Gumbel` makes them."""
    info = torch.finfo(like.dtype)
    low, high = torch.tensor(info.tiny), torch.tensor(1.0 - info.eps)
    numbers = low + uniform(like) * (high - low)
    return -(-numbers.log()).log()
