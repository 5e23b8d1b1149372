"""A feed-forward layer with many experts, of which every token uses a few. No token is dropped.

Shapes: T tokens, k choices per token, E experts, C width of the residual stream, H width inside an expert, S = T k slots sorted by expert.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from ztk.core.runtime.planned import without_autocast
from ztk.kernels import Routing, grouped_matmul, grouped_matmul_pair, moe_combine, moe_route, moe_slots, swiglu
from ztk.kernels.launch.functions import Function, is_transformed
from ztk.nn.balance import ExpertLoad, RouterLosses
from ztk.nn.config import DecoderConfig
from ztk.nn.mlp import SwiGLU


class Exchange(Protocol):
    """Sends tokens to experts on other ranks and returns their results. `ztk.parallel.moe.exchange.ExpertExchange` is one."""

    def __call__(
        self,
        tokens: Tensor,
        *,
        routing: Routing,
        experts: Callable[..., Tensor],
        meanwhile: Callable[[], Tensor] | None,
        weight: float,
    ) -> "Exchanged": ...


class Exchanged(Protocol):
    """rows [S, C]: every slot's result. counts [E]: choices per expert over all ranks, multiplied by the weights of their micro-batches.
    meanwhile: the result of the function that ran during the all-to-all."""

    rows: Tensor
    counts: Tensor
    meanwhile: Tensor | None


class Router(nn.Module):
    """tokens [T, C] -> logits fp32 [T, E], never rounded to the model's dtype: a rounded logit changes the chosen experts.

    The product of two 16-bit numbers is exact in fp32, so on a GPU 16-bit inputs are multiplied directly and added up in fp32. Gradients of
    logits are fp32, and so are their products.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.experts, config.dim))
        nn.init.normal_(self.weight, std=config.dim**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        with without_autocast(tokens.device):
            if is_transformed():
                return tokens.float() @ self.weight.float().t()
            return _LogitProduct.apply(tokens, self.weight)


class _LogitProduct(Function):
    """tokens [T, C] times weight [E, C] transposed, in fp32. Saves no fp32 copy of inputs in other dtypes."""

    @staticmethod
    def forward(ctx, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        ctx.dtypes = tokens.dtype, weight.dtype
        is_narrow = tokens.dtype is weight.dtype and tokens.dtype in (torch.bfloat16, torch.float16)
        if is_narrow and _adds_wide_sums(tokens):
            return torch.mm(tokens, weight.t(), out_dtype=torch.float32)
        return tokens.float() @ weight.float().t()

    @staticmethod
    def backward(ctx, d_logits: Tensor) -> tuple[Tensor | None, Tensor | None]:
        tokens, weight = ctx.saved_tensors
        d_tokens = d_weight = None
        if weight is not None:
            d_tokens = (d_logits @ weight.float()).to(ctx.dtypes[0])
        if tokens is not None:
            d_weight = (d_logits.t() @ tokens.float()).to(ctx.dtypes[1])
        return d_tokens, d_weight


def _adds_wide_sums(tokens: Tensor) -> bool:
    """Whether torch supports 16-bit products with an fp32 result on the device of `tokens`: on NVIDIA's GPUs."""
    return tokens.device.type != "cpu" and not torch.version.hip


class StackedExperts(nn.Module):
    """SwiGLU experts whose weights are stacked: `gate` and `up` [E, C, H], `down` [E, H, C]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        inner = config.expert_hidden_dim
        self.gate = nn.Parameter(torch.empty(config.experts, config.dim, inner))
        self.up = nn.Parameter(torch.empty(config.experts, config.dim, inner))
        self.down = nn.Parameter(torch.empty(config.experts, inner, config.dim))
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(
        self, x: Tensor, *, offsets: Tensor, order: Tensor | None = None, position: Tensor | None = None
    ) -> Tensor:
        """x [T, C], read through `order` and `position`, or already sorted by expert without them; offsets int32 [E + 1] -> [S, C] by
        slot."""
        x, (gate, up, down) = _cast_for_autocast(x, weights=(self.gate, self.up, self.down))
        gated, raised = grouped_matmul_pair(x, gate, up, offsets=offsets, order=order, position=position)
        return grouped_matmul(swiglu(gated, raised), down, offsets=offsets)


class SparseMLP(nn.Module):
    """x [..., C] -> the weighted sum of each token's `experts_per_token` best experts, and of the shared expert if there is one.

    Weights are the router's probabilities of the chosen experts, divided by their sum. With `exchange` the experts are distributed over
    ranks, and `experts` are this rank's. `choose` may replace the router's choice, int32 [T, k].
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.top_k = config.experts_per_token
        self.router = Router(config)
        self.experts = StackedExperts(config)
        shared = config.shared_hidden_dim
        self.shared = SwiGLU(config, hidden_dim=shared) if shared else None
        self.losses = RouterLosses(balance_weight=config.balance_loss_weight, z_weight=config.router_z_loss_weight)
        self.load = ExpertLoad()
        self.exchange: Exchange | None = None
        self.choose: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        logits = self.router(tokens)
        routing = moe_route(logits, top_k=self.top_k)
        if self.choose is not None:
            chosen = self.choose(routing.experts)
            routing = routing if chosen is routing.experts else _routing_to(chosen, logits=logits)
        rows, counts, shared = self._through_experts(tokens, routing=routing)
        out = moe_combine(rows, weights=routing.weights, position=routing.position)
        if shared is not None:
            out = out + shared
        if self.training:
            out = self.losses(out, logits=logits, counts=counts, load=self.load)
        return out.view_as(x)

    def _through_experts(self, tokens: Tensor, *, routing: Routing) -> tuple[Tensor, Tensor, Tensor | None]:
        """rows [S, C] by slot, choices per expert [E] over all ranks, the shared expert's result [T, C]."""
        shared = None if self.shared is None else lambda: self.shared(tokens)
        if self.exchange is not None:
            weight = self.losses.weight
            done = self.exchange(tokens, routing=routing, experts=self.experts, meanwhile=shared, weight=weight)
            return done.rows, done.counts, done.meanwhile
        rows = self.experts(tokens, offsets=routing.offsets, order=routing.order, position=routing.position)
        return rows, routing.counts, None if shared is None else shared()


def _routing_to(experts: Tensor, *, logits: Tensor) -> Routing:
    """Routes to given experts, int32 [T, k], with weights from logits [T, E]: equal to `moe_route` for its own choice, up to rounding."""
    slots = moe_slots(experts, num_experts=logits.shape[1])
    return Routing(
        weights=logits.gather(1, experts.long()).softmax(-1),
        experts=experts,
        counts=slots.counts,
        offsets=slots.offsets,
        order=slots.order,
        position=slots.position,
    )


def _cast_for_autocast(x: Tensor, *, weights: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`x` and `weights` in the dtype of the surrounding autocast, if there is one."""
    device = x.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return x, weights
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), tuple(weight.to(dtype) for weight in weights)
