"""LAMB: Adam whose step is scaled, for each parameter, by the ratio of the norms of its weights and its update.

    exp_avg    = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g^2
    update     = exp_avg / (sqrt(exp_avg_sq) + eps) + weight_decay * master
    ratio      = clamp(|master| / |update|, min_coeff, max_coeff)          1 where a norm is 0
    master     = master - lr * bias_correction2_sqrt / bias_correction1 * ratio * update

Everything but the two norms is elementwise. You et al. 2020, https://arxiv.org/abs/1904.00962. Like DeepSpeed's FusedLamb, it corrects the
bias in the rate and not in the averages. Every operation rounds once, so an element's bits depend only on that element and the ratio, for
any cut of a shard.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.kernels import Control


@dataclass(frozen=True, kw_only=True, slots=True)
class Lamb:
    """min_coeff, max_coeff: bounds of the ratio."""

    min_coeff: float = 0.01
    max_coeff: float = 10.0

    def average(self, *, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, control: Tensor) -> None:
        """Updates both averages in place. grad: scaled and summed, [n]; averages: float32 [n]; control: one row of the control table."""
        fresh = grad.to(torch.float32) * control[Control.grad_coefficient]
        exp_avg.mul_(control[Control.beta1]).add_(fresh * (1 - control[Control.beta1]))
        exp_avg_sq.mul_(control[Control.beta2]).add_(fresh.square_().mul_(1 - control[Control.beta2]))

    def direction(self, master: Tensor, *, exp_avg: Tensor, exp_avg_sq: Tensor, control: Tensor) -> Tensor:
        """`update` of the module docstring, float32 [n], from the current averages."""
        decay = master * control[Control.weight_decay]
        return (exp_avg / exp_avg_sq.sqrt().add_(control[Control.eps])).add_(decay)

    def ratio(self, squares: Tensor) -> Tensor:
        """float32 [parameters]. squares: float64 [parameters, 2], the squared norms of weights and updates."""
        weights, update = squares.sqrt().to(torch.float32).unbind(1)
        ratio = (weights / update).clamp(self.min_coeff, self.max_coeff)
        return torch.where((weights > 0) & (update > 0), ratio, torch.ones_like(ratio))

    def step(
        self, master: Tensor, *, exp_avg: Tensor, exp_avg_sq: Tensor, ratio: Tensor, control: Tensor, out: Tensor | None
    ) -> None:
        """Applies the last line of the module docstring in place. ratio: []; out: 16-bit [n] that receives the cast master."""
        rate = control[Control.lr] * control[Control.bias_correction2_sqrt] / control[Control.bias_correction1] * ratio
        update = self.direction(master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, control=control)
        master.sub_(update.mul_(rate))
        if out is not None:
            out.copy_(master)
