"""`deepspeed.moe.sharded_moe`: dense gating, which assigns tokens to slots of experts and computes their weights, and an all-to-all.

T tokens, E experts. C is the capacity, the number of tokens per expert: max(ceil(T / E * k * capacity_factor), min_capacity) if tokens
are dropped, else the load of the busiest expert. `ztk.parallel.moe.MoE` itself never creates the [T, E, C] tensors. Logits have any
floating-point dtype; weights and losses are computed in fp32.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ztk.kernels.launch.functions import Function
from ztk.parallel.moe.gate import Assignment, GatePolicy, Gating, assign, jitter, uniform

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


class TopKGate(nn.Module):
    """hidden [T, C] -> (l_aux, combine_weights [T, E, C], dispatch_mask [T, E, C], exp_counts [E]).

    `wg` is the gate's linear layer, computed in float32. ep_group: must be None; only `MoE` equalizes capacities across ranks.
    min_capacity: tokens per expert.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: None = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.ep_group, self.k = ep_group, k
        self.capacity_factor, self.eval_capacity_factor, self.min_capacity = (
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
        )
        self.noisy_gate_policy, self.drop_tokens, self.use_rts = noisy_gate_policy, drop_tokens, use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def forward(self, input: Tensor, used_token: Tensor | None = None) -> Gated:
        """input: [T, model_dim]. used_token: [T], 0 for tokens to ignore. Raises ValueError if it is given with k above 1."""
        x = input.float()
        if self.noisy_gate_policy == "Jitter" and self.training:
            x = jitter(x, uniform=uniform)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x, self.wg.weight.float())
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        common = {"min_capacity": self.min_capacity, "drop_tokens": self.drop_tokens, "ep_group": self.ep_group}
        if self.k == 1:
            noise = self.noisy_gate_policy if self.training else None
            return top1gating(
                logits, factor, used_token=used_token, noisy_gate_policy=noise, use_rts=self.use_rts, **common
            )
        if used_token is not None:
            raise ValueError(f"used_token works with k=1 only (have k={self.k}); leave it out")
        if self.k == 2:
            return top2gating(logits, factor, top2_2nd_expert_sampling=self.top2_2nd_expert_sampling, **common)
        return topkgating(logits, self.k, factor, **common)


class AllToAll(Function):
    """`_AllToAll.apply(group, x)`: sends chunk i of the first dimension of x [ranks * n, ..] to rank i of `group`; also for the
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup | None, input: Tensor) -> Tensor:
        ctx.group = group
        out = torch.empty_like(input, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, input.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *d_out: Tensor) -> tuple[None, Tensor]:
        return None, AllToAll.apply(ctx.group, *d_out)


_AllToAll = AllToAll  # DeepSpeed's name
