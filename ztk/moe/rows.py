"""Rows of tokens in the order of slots and back, differentiable without atomics. T tokens, k choices each, S = T k slots."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ztk.kernels.moe_combine import combine


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """Where rows that know their expert go when they are sorted by it, those of one expert in the order in which they were."""

    offsets: Tensor  # int32 [E + 1], the first slot of each expert
    order: Tensor  # int32 [S], slot -> token * k + choice
    position: Tensor  # int32 [T, k], (token, choice) -> slot

    @staticmethod
    def of(experts: Tensor, *, num_experts: int) -> "Slots":
        """experts: integers [T, k] below `num_experts`. Nothing waits for the device."""
        flat = experts.flatten()
        order = flat.sort(stable=True).indices
        counts = count(experts, num_experts=num_experts)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        position = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        return Slots(offsets=offsets.int(), order=order.int(), position=position.view(experts.shape).int())


def count(experts: Tensor, *, num_experts: int) -> Tensor:
    """int64 [E]: how often each expert stands in `experts`. `bincount` would wait for a GPU."""
    flat = experts.flatten().long()
    return torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def gather_rows(x: Tensor, *, order: Tensor, position: Tensor) -> Tensor:
    """x [T, C] -> [S, C]: slot s holds row order[s] // k. A row's gradient is the sum of its slots', in the order of choices."""
    return _GatherRows.apply(x, order, position)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, position: Tensor) -> Tensor:
        ctx.save_for_backward(position)
        return x.index_select(0, order // position.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, d_rows: Tensor) -> tuple[Tensor, None, None]:
        (position,) = ctx.saved_tensors
        return combine(d_rows.contiguous(), None, position), None, None
