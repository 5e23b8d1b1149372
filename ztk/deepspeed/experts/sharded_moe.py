"""DeepSpeed's dense gating functions. They assign tokens to slots of experts and compute their weights.

T tokens, E experts. C is the capacity, the number of tokens per expert: max(ceil(T / E * k * capacity_factor), min_capacity) if tokens
are dropped, else the load of the busiest expert. `ztk.parallel.moe.MoE` itself never creates the [T, E, C] tensors. Logits have any
floating-point dtype; weights and losses are computed in fp32.
"""

import torch
from torch import Tensor

from ztk.parallel.moe.gate import Assignment, GatePolicy, Gating, assign

# (l_aux, combine_weights float32 [T, E, C], dispatch_mask bool [T, E, C], exp_counts int64 [E])
Gated = tuple[Tensor, Tensor, Tensor, Tensor]


def top1gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: None = None,
) -> Gated:
    """logits: [T, E]. used_token: [T], 0 for tokens to ignore."""
    policy = _policy(1, capacity_factor, min_capacity, drop_tokens, noise=noisy_gate_policy, random_selection=use_rts)
    return _gated(logits, policy=policy, used_token=used_token, ep_group=ep_group)


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: None = None,
    top2_2nd_expert_sampling: bool = True,
) -> Gated:
    """logits: [T, E]."""
    policy = _policy(2, capacity_factor, min_capacity, drop_tokens, sample_second=top2_2nd_expert_sampling)
    return _gated(logits, policy=policy, ep_group=ep_group)


def topkgating(
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: None = None,
    drop_policy: str = "probs",
) -> Gated:
    """Routes every token to its `k` best experts, up to each expert's capacity. logits: [T, E]; k from 3 on.

    Raises ValueError for a smaller k and for another drop_policy than "probs".
    """
    if k < 3:
        raise ValueError(f"topkgating(k={k}): use top1gating or top2gating")
    if drop_policy != "probs":
        raise ValueError(
            f"drop_policy={drop_policy!r}: experts keep the tokens that chose them with the largest probability; use 'probs'"
        )
    return _gated(logits, policy=_policy(k, capacity_factor, min_capacity, drop_tokens), ep_group=ep_group)


def _policy(
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool,
    *,
    noise: str | None = None,
    random_selection: bool = False,
    sample_second: bool = False,
) -> GatePolicy:
    return GatePolicy(
        k=k,
        capacity_factor=capacity_factor,
        eval_capacity_factor=capacity_factor,
        min_capacity=min_capacity,
        noise=noise,
        drop_tokens=drop_tokens,
        random_selection=random_selection,
        sample_second=sample_second,
    )


def _gated(logits: Tensor, *, policy: GatePolicy, used_token: Tensor | None = None, ep_group: None = None) -> Gated:
    if ep_group is not None:
        raise ValueError("ep_group: ztk's ranks agree inside MoE; leave it out")
    gating = Gating(
        policy=policy, training=True, largest_load=lambda counts: max(1, int(counts.max())), used_token=used_token
    )
    chosen = assign(logits.float(), gating=gating)
    combine = _dense(chosen, num_experts=logits.shape[1])
    return chosen.l_aux, combine, combine.bool(), chosen.exp_counts


def _dense(chosen: Assignment, *, num_experts: int) -> Tensor:
    tokens = chosen.experts.shape[0]
    flat = chosen.experts * chosen.capacity + chosen.places.clamp(0, chosen.capacity - 1)
    empty = torch.zeros(tokens, num_experts * chosen.capacity, device=flat.device)
    return empty.scatter_add(1, flat, chosen.weights * chosen.kept).view(tokens, num_experts, chosen.capacity)
