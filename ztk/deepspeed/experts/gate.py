"""DeepSpeed's gate as a module, and its all-to-all, for custom layers of other projects.

Results have the dtype of their inputs.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ztk.deepspeed.experts.sharded_moe import Gated, top1gating, top2gating, topkgating
from ztk.parallel.moe.gate import jitter, uniform


class TopKGate(nn.Module):
    """hidden [T, C] -> (l_aux, combine_weights [T, E, C], dispatch_mask [T, E, C], exp_counts [E]); see `sharded_moe`.

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


class AllToAll(torch.autograd.Function):
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
