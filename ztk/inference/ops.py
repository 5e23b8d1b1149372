"""Norms, MLPs and experts of a block, on the CPU and by ztk's kernels. In both, a row has the same bits for any other rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ztk.inference.describe import Description
from ztk.inference.kernel_products import RowsProduct
from ztk.inference.placement import Placement
from ztk.inference.products import Affine
from ztk.inference.weights import Layer, Mlp
from ztk.kernels import activate_cpu, gated_rows, layer_norm, linear_rows, moe_combine, moe_route
from ztk.kernels import rms_norm as rms_norm_kernel
from ztk.kernels.shared.cpu_rows import rms_norm

ACTIVATIONS = {  # transformers' names -> names in `ztk.kernels`
    "silu": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def ops_of(description: Description, *, placement: Placement) -> "CpuOps | KernelOps":
    """Raises ValueError for an activation that is not supported."""
    if description.activation not in ACTIVATIONS:
        raise ValueError(
            f"activation {description.activation} is not supported by the inference engine: it has {', '.join(ACTIVATIONS)}"
        )
    return KernelOps(description, exact=placement.exact) if placement.by_kernels else CpuOps(description)


class CpuOps:
    """Torch's operations on fp32 rows, experts one after the other. x and the results are [M, C].

    chosen: gets the experts of every row, best first, [M, choices] a layer.
    """

    def __init__(self, description: Description) -> None:
        self._of, self._activation = description, ACTIVATIONS[description.activation]
        self._is_layer_norm = description.norm == "layer"
        self.chosen: list[Tensor] | None = None

    def norm(self, x: Tensor, *, by: Affine) -> Tensor:
        """The family's norm over the last dimension."""
        if self._is_layer_norm:
            return F.layer_norm(x, x.shape[-1:], by.weight, by.bias, self._of.norm_eps)
        return rms_norm(x, weight=by.weight, eps=self._of.norm_eps)

    def add_and_norm(self, x: Tensor, *, added: Tensor, by: Affine | None) -> tuple[Tensor, Tensor]:
        """(x + added, the norm of that sum); without `by` the sum twice."""
        total = x + added
        return total, total if by is None else self.norm(total, by=by)

    def mlp(self, x: Tensor, *, weights: Mlp, residual: Tensor | None = None) -> Tensor:
        """The MLP, plus `residual`. Where ranks share the model, this rank's part of the sum."""
        raised = weights.up(x)
        if weights.gate is None:
            return weights.down(activate_cpu(raised, activation=self._activation), residual)
        gate = weights.gate(x)
        return weights.down(activate_cpu(gate, activation=self._activation).mul_(raised), residual)

    def experts(self, x: Tensor, *, layer: Layer) -> Tensor:
        """The weighted sum of each row's chosen experts, without the shared expert."""
        assert layer.router is not None and isinstance(layer.experts, list), "one Mlp for each expert"
        probabilities = torch.softmax(layer.router(x), dim=-1)
        weights, chosen = probabilities.topk(self._of.experts_per_token, dim=-1)
        if self.chosen is not None:
            self.chosen.append(chosen)
        if self._of.normalise_experts:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(layer.experts):  # in this order for every token
            rows, place = torch.where(chosen == number)
            if len(rows):
                out[rows] += self.mlp(x[rows], weights=expert) * weights[rows, place, None]
        return out


class KernelOps:
    """The operations of `CpuOps` in the placement's dtype, by kernels over rows: Triton's on a GPU, otherwise their CPU implementations.

    exact: see `ztk.kernels.linear_rows`.
    """

    def __init__(self, description: Description, *, exact: bool) -> None:
        self._of, self._activation, self._exact = description, ACTIVATIONS[description.activation], exact
        self.chosen: list[Tensor] | None = None

    def norm(self, x: Tensor, *, by: Affine) -> Tensor:
        if self._of.norm == "layer":
            return layer_norm(x, by.weight, by.bias, eps=self._of.norm_eps)
        return rms_norm_kernel(x, by.weight, eps=self._of.norm_eps)

    def add_and_norm(self, x: Tensor, *, added: Tensor, by: Affine | None) -> tuple[Tensor, Tensor]:
        if by is None or self._of.norm == "layer":
            total = x + added
            return total, total if by is None else self.norm(total, by=by)
        normed, total = rms_norm_kernel(added, by.weight, eps=self._of.norm_eps, residual=x)
        return total, normed

    def mlp(self, x: Tensor, *, weights: Mlp, residual: Tensor | None = None) -> Tensor:
        if weights.gate is None:
            return weights.down(RowsProduct.of(weights.up)(x, activation=self._activation), residual)
        inner = gated_rows(x, *_pair(weights), activation=self._activation, exact=self._exact)
        return weights.down(inner, residual)

    def experts(self, x: Tensor, *, layer: Layer) -> Tensor:
        of, experts = self._of, layer.experts
        assert layer.router is not None and isinstance(experts, Mlp), "the experts are stacked"
        routing = moe_route(layer.router(x), top_k=of.experts_per_token, normalise=of.normalise_experts)
        if self.chosen is not None:
            self.chosen.append(routing.experts)
        where = {"offsets": routing.offsets, "order": routing.order, "top_k": of.experts_per_token}
        inner = gated_rows(x, *_pair(experts), activation=self._activation, **where)
        down = RowsProduct.of(experts.down)
        out = linear_rows(down.padded(inner), down.weight, down.scales, offsets=routing.offsets)
        return moe_combine(out, weights=routing.weights, position=routing.position)


def _pair(mlp: Mlp) -> tuple[Tensor | None, ...]:
    gate, up = RowsProduct.of(mlp.gate), RowsProduct.of(mlp.up)
    return gate.weight, up.weight, gate.scales, up.scales, gate.bias, up.bias
