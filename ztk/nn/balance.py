"""Load balance of a router: auxiliary losses and metrics.

Per layer, with T tokens, k choices each among E experts, f_e the share of all T k choices that fell on expert e and P_e the mean
probability of e:

    balance = E * sum_e f_e P_e      1 when even, up to E / k when not  (Fedus et al. 2021, https://arxiv.org/abs/2101.03961)
    z = mean over tokens of logsumexp(logits)^2                          (Zoph et al. 2022, https://arxiv.org/abs/2202.08906)

A micro-batch with a loss weight has this weight in f_e, in P_e and in the mean of z. Losses have the dtype fp32, counts any.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ztk.kernels import router_losses
from ztk.kernels.launch.functions import OnceFunction, is_transformed


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSums:
    """A layer's sums since the metrics were last read; tensors on the device.

    assigned: float64 [E], choices per expert, dropped ones included. totals: float64 [4], dropped choices, balance losses, z-losses,
    forwards.
    """

    assigned: Tensor
    totals: Tensor

    def __add__(self, other: "LoadSums") -> "LoadSums":
        return LoadSums(assigned=self.assigned + other.assigned, totals=self.totals + other.totals)


class ExpertLoad:
    """Sums a layer's metrics on the device. Nothing waits for the device until they are read."""

    def __init__(self) -> None:
        self._sums: LoadSums | None = None

    def add(
        self,
        *,
        counts: Tensor,
        dropped: Tensor | None = None,
        balance: Tensor,
        z: Tensor | None = None,
        weight: float = 1.0,
    ) -> None:
        """Adds one forward. counts: choices per expert [E]. dropped: number of dropped choices. balance, z: the two losses. weight: the
        micro-batch's."""
        zero = balance.new_zeros((), dtype=torch.float64)
        parts = [zero if part is None else part.detach().double() for part in (dropped, balance, z)]
        totals = torch.stack([*parts, zero + 1]) * weight
        sums = LoadSums(assigned=counts.double(), totals=totals)
        self._sums = sums if self._sums is None else sums + self._sums

    def take(self) -> LoadSums | None:
        """Returns the sums and resets them; None if there was no forward."""
        sums, self._sums = self._sums, None
        return sums


class RouterLosses(nn.Module):
    """Adds a router's losses to the gradients, without changing the loss that the model returns.

    As in Megatron-LM, their gradients enter the backward at the layer's output. So blocks stay functions of one tensor and can be
    recomputed or run in a pipeline. The model's loss does not contain these terms; the layer's metrics do.

    loss_scale: factor on the model's loss before the backward, a device scalar that may change. Defaults to 1. summed_over: number of ranks
    that have different tokens of one mean and sum their gradients. weight: the current micro-batch's, see `weighing`.
    """

    def __init__(self, *, balance_weight: float, z_weight: float) -> None:
        super().__init__()
        self.balance_weight, self.z_weight = balance_weight, z_weight
        self.loss_scale: Tensor | None = None
        self.summed_over = 1
        self.weight = 1.0

    def forward(self, out: Tensor, *, logits: Tensor, counts: Tensor, load: ExpertLoad) -> Tensor:
        """`out` with the losses attached. logits: fp32 [T, E]. counts: [E], choices per expert over all tokens that are balanced together,
        multiplied by their micro-batches' weights."""
        balance, z = router_losses(logits, counts=counts).unbind()
        if not is_transformed():  # whose tensors must not outlive it
            load.add(counts=counts, balance=balance, z=z, weight=self.weight)
        if self.balance_weight == 0 and self.z_weight == 0:
            return out
        loss = (self.balance_weight * balance + self.z_weight * z) * (self.weight / self.summed_over)
        return _Attach.apply(out, loss, self.loss_scale)


@contextmanager
def weighing(model: nn.Module, *, weight: float) -> Iterator[None]:
    """Context in which forwards and recomputed forwards belong to a micro-batch whose loss has this weight."""
    losses = [] if weight == 1.0 else [module for module in model.modules() if isinstance(module, RouterLosses)]
    for module in losses:
        module.weight = weight
    try:
        yield
    finally:
        for module in losses:
            module.weight = 1.0


def scale_router_losses(model: nn.Module, *, loss_scale: Tensor) -> None:
    """Scales router losses like the model's loss, by a float32 device scalar that may change."""
    for module in model.modules():
        if isinstance(module, RouterLosses):
            module.loss_scale = loss_scale


class _Attach(OnceFunction):
    """Returns `out`. In the backward, `loss` gets the same gradient as the model's loss."""

    INSTEAD = (
        "Call model.eval(), or set balance_loss_weight and router_z_loss_weight to 0: these losses only enter gradients"
    )

    @staticmethod
    def forward(ctx, out: Tensor, loss: Tensor, scale: Tensor | None) -> Tensor:
        ctx.scale, ctx.like = scale, loss.new_ones(())
        return out.detach()

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
        return d_out, ctx.like if ctx.scale is None else ctx.like * ctx.scale, None
