"""Measures each layer: seconds of forward and backward on one micro-batch.

Only one layer is in memory at a time. Layers of the same kind with parameters of the same shapes are measured once.
"""

import time
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ztk.parallel.pipeline.layers import Carry, Layer, LayeredModel, MicroBatch
from ztk.parallel.pipeline.module import PipelineModule

REPEATS = 3  # the fastest run counts, because disturbances only add time


def measure_costs(model: LayeredModel, *, batch: MicroBatch, device: torch.device) -> list[float]:
    """Seconds per layer on `device`, with random weights for parameters on the meta device. Parameters, buffers and random state stay
    unchanged."""
    costs, known = [], {}
    place = partial(pytree.tree_map_only, Tensor, lambda tensor: tensor.to(device))
    batch = replace(batch, args=place(batch.args), kwargs=place(batch.kwargs))
    carry: Carry = None
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for index, layer in enumerate(model.layers):
            modules = _modules(model, index=index)
            key = layer.kind, tuple(tuple(p.shape) for module in modules for p in module.parameters())
            with _Materialised(modules, device=device):
                if hasattr(model.module, "materialise_buffers"):
                    # pyrefly: ignore[not-callable]  # nn.Module types every attribute as Tensor or Module
                    model.module.materialise_buffers(device)
                output = layer.run(carry, batch)
                if key not in known or index in (0, len(model.layers) - 1):
                    known[key] = min(_seconds(layer, carry=carry, batch=batch, device=device) for _ in range(REPEATS))
            costs.append(known[key])
            carry = pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
            if isinstance(model, PipelineModule):
                model.forget(index)
    return costs


def _modules(model: LayeredModel, *, index: int) -> list[nn.Module]:
    if isinstance(model, PipelineModule):
        model.keep([index])
    return [model.module.get_submodule(path) for path in model.layers[index].modules]


def _seconds(layer: Layer, *, carry: Carry, batch: MicroBatch, device: torch.device) -> float:
    leaves = [leaf for leaf in pytree.tree_leaves(carry) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    _wait_for(device)
    start = time.perf_counter()
    outputs = [leaf for leaf in pytree.tree_leaves(layer.run(carry, batch)) if isinstance(leaf, Tensor)]
    wanted = [leaf for leaf in outputs if leaf.requires_grad]
    torch.autograd.backward(wanted, [torch.ones_like(leaf) for leaf in wanted])
    _wait_for(device)
    for leaf in leaves:
        leaf.grad = None
    return time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Materialised:
    """Context in which modules have copies of their parameters and buffers on `device`; small random values for parameters on the meta
    device."""

    def __init__(self, modules: list[nn.Module], *, device: torch.device) -> None:
        owners = [owner for module in modules for owner in module.modules()]
        self._tables = [table for owner in owners for table in (owner._parameters, owner._buffers)]
        self._device = device
        self._before: list[tuple[dict, str, Tensor]] = []

    def __enter__(self) -> None:
        made: dict[Tensor, Tensor] = {}
        for table in self._tables:
            for name, value in table.items():
                if value is None or not self._needs_copy(value):
                    continue
                if value not in made:
                    made[value] = self._copy(value)
                self._before.append((table, name, value))
                table[name] = made[value]

    def _needs_copy(self, value: Tensor) -> bool:
        """Whether to copy the tensor. Buffers are always copied, because a forward may write to them; the model fills those on the meta
        device."""
        return value.device != self._device if isinstance(value, nn.Parameter) else not value.is_meta

    def _copy(self, value: Tensor) -> Tensor:
        if not isinstance(value, nn.Parameter):
            return value.to(self._device, copy=True)
        values = (
            torch.randn(value.shape, device=self._device) * 0.02 if value.is_meta else value.detach().to(self._device)
        )
        return nn.Parameter(values, requires_grad=value.requires_grad)

    def __exit__(self, *_) -> None:
        for table, name, value in self._before:
            table[name] = value
