"""Distributes a model's experts over the ranks of the mesh's expert axis, from outside: the model is written for one rank.

Three kinds of layers are supported: the decoder's own (`ztk.nn`), `ztk.parallel.moe.MoE` with modules as experts, and stacked ones as in
Hugging Face's models (`ztk.parallel.moe.stacked`).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ztk.core.runtime import Mesh
from ztk.core.runtime.part import Part, share_first_values
from ztk.nn.moe import SparseMLP
from ztk.parallel.moe.exchange import ExpertExchange
from ztk.parallel.moe.layer import MoE
from ztk.parallel.moe.stacked import SpreadExperts, is_stacked_experts

_KEY = "topology.expert (MoE's ep_size)"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayer:
    """A module of the model that has experts."""

    name: str
    module: nn.Module

    @property
    def num_experts(self) -> int:
        """Experts of the full model, before they are distributed."""
        return self.module.router.weight.shape[0] if isinstance(self.module, SparseMLP) else self.module.num_experts


def expert_layers(model: nn.Module, *, pattern: str | None = None) -> Iterator[ExpertLayer]:
    """The layers of `model` whose experts can be distributed; with `pattern`, only layers whose name matches it.

    pattern: a regular expression. Raises ValueError if it matches no such layer.
    """
    found = False
    for name, module in model.named_modules():
        if (isinstance(module, SparseMLP | MoE) or is_stacked_experts(module)) and re.search(pattern or "", name):
            found = True
            yield ExpertLayer(name=name, module=module)
    if pattern is not None and not found:
        raise ValueError(
            f"experts={pattern!r}: matches no layer with experts. Layers are ztk's MoE, the decoder's, and modules with "
            "`num_experts`, stacked parameters [num_experts, ...] and forward(hidden_states, top_k_index, top_k_weights)"
        )


def shard_experts(
    model: nn.Module, *, mesh: Mesh, pattern: str | None = None, tokens_cut_along_tp: bool = False
) -> dict[str, Part]:
    """Keeps this rank's experts of every layer, in place, and inserts the all-to-alls. A collective call along "ep".

    Stacked weights are cut along their first dimension; if experts are modules, other ranks' experts are removed. Names stay: expert 5
    is `experts.5` on the rank that has it. Parameters on the meta device stay there; other values come from the axis' first rank.
    The load-balancing loss counts over all data-parallel ranks, whether or not experts are distributed.

    pattern: the same as for `expert_layers`. tokens_cut_along_tp: tensor-parallel ranks have different tokens at the layers, and sum their
    gradients.
    Returns the parts by parameter name, none if the mesh has no expert axis.

    Raises ValueError if the ranks do not divide the number of experts, and for an expert axis that no layer uses.
    """
    layers = list(expert_layers(model, pattern=pattern))
    degree = mesh.comm("ep").size
    spread = [layer for layer in layers if not _stays_unspread(layer, degree=degree)]
    if degree > 1 and not spread and mesh.comm("pp").size == 1:
        raise ValueError(
            f"topology.expert={degree}: the model has no layer whose experts could be spread; use topology.expert=1"
            + (f", or MoE(ep_size={degree})" if layers else "")
        )
    parts: dict[str, Part] = {}
    for layer in spread:
        if layer.num_experts % degree:
            raise ValueError(
                f"topology.expert={degree}: {layer.name} has {layer.num_experts} experts, not a multiple; "
                f"use topology.expert={_largest_divisor(layer.num_experts, at_most=degree)}"
            )
        parts |= _Cutter(mesh, layer=layer).spread() if degree > 1 else {}
    for module in model.modules():
        if isinstance(module, MoE) and mesh.comm("tp").size > 1 and not tokens_cut_along_tp:
            module.same_tokens = mesh.comm("tp")
    cut_along = mesh.comm("tp") if tokens_cut_along_tp and mesh.comm("tp").size > 1 else None
    for layer in layers:
        if isinstance(layer.module, SparseMLP) and (mesh.comm("data").size > 1 or cut_along is not None):
            # pyrefly: ignore[bad-assignment]  # its results are frozen, which a protocol's fields are not
            layer.module.exchange = ExpertExchange(mesh, label=layer.name, cut_along=cut_along)
            layer.module.losses.summed_over = 1 if cut_along is None else cut_along.size
    return parts


class _Cutter:
    """Cuts one layer down to this rank's experts."""

    def __init__(self, mesh: Mesh, *, layer: ExpertLayer) -> None:
        self._mesh, self._layer, self._comm = mesh, layer, mesh.comm("ep")
        count = layer.num_experts // self._comm.size
        self._own = range(self._comm.rank * count, (self._comm.rank + 1) * count)

    def spread(self) -> dict[str, Part]:
        module = self._layer.module
        if isinstance(module, MoE):
            return self._keep_own_modules(module)
        if isinstance(module, SparseMLP):
            return self._cut_stacked(module.experts, name=f"{self._layer.name}.experts")
        parts = self._cut_stacked(module, name=self._layer.name)
        exchange = ExpertExchange(self._mesh, label=self._layer.name)
        module.forward = SpreadExperts(module.forward, num_experts=module.num_experts, exchange=exchange)
        module.num_experts = len(self._own)  # read by its own forward
        return parts

    def _cut_stacked(self, module: nn.Module, *, name: str) -> dict[str, Part]:
        parts = {}
        for leaf, parameter in module.named_parameters(recurse=False):
            path = f"{name}.{leaf}" if name else leaf
            share_first_values(parameter, comm=self._comm, name=path, key=_KEY)
            part = Part.cut(tuple(parameter.shape), dim=0, start=self._own.start, stop=self._own.stop, **self._traits())
            parameter.data = part.of(parameter.data).clone()
            parts[path] = part
        return parts

    def _keep_own_modules(self, module: MoE) -> dict[str, Part]:
        module.comm = self._comm
        parts = {}
        for number in range(self._layer.num_experts):
            prefix = f"{self._layer.name}.experts.{number}".lstrip(".")
            expert = module.experts[str(number)]
            for leaf, parameter in expert.named_parameters():
                share_first_values(parameter, comm=self._comm, name=f"{prefix}.{leaf}", key=_KEY)
                if number in self._own:
                    parts[f"{prefix}.{leaf}"] = Part.everything(tuple(parameter.shape), **self._traits())
            if number not in self._own:
                del module.experts[str(number)]
        return parts

    def _traits(self) -> dict:
        """Keywords of parts. Tensor-parallel ranks have the same experts and the same tokens."""
        return {"axis": "expert_data", "replica": self._mesh.comm("tp").rank}


def _stays_unspread(layer: ExpertLayer, *, degree: int) -> bool:
    """Whether the layer is not distributed: `ep_size` of `MoE` is the size of the axis, or 1.

    Raises ValueError for another number.
    """
    size = getattr(layer.module, "ep_size", degree)
    if isinstance(layer.module, MoE) and size not in (1, degree):
        raise ValueError(
            f"{layer.name}: MoE(ep_size={size}) on a mesh with topology.expert={degree}; use ep_size={degree}, or "
            f"topology.expert={size}"
        )
    return isinstance(layer.module, MoE) and size == 1


def _largest_divisor(number: int, *, at_most: int) -> int:
    return next(divisor for divisor in range(at_most, 0, -1) if number % divisor == 0)
