"""What each layer costs, measured: seconds of forward and backward on one micro-batch.

One layer has memory at a time. Layers of the same kind with parameters of the same shapes cost the same and are measured once.
"""

import time

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ztk.pipeline.layers import Carry, Layer, LayeredModel, MicroBatch
from ztk.pipeline.module import PipelineModule

REPEATS = 3  # the fastest counts: a pause of the machine only ever adds


def measure_costs(model: LayeredModel, *, batch: MicroBatch, device: torch.device) -> list[float]:
    """Seconds per layer on `device`, with made-up weights. Parameters and random state are left as they were."""
    costs, known = [], {}
    carry: Carry = None
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for index, layer in enumerate(model.layers):
            modules = _modules(model, index=index)
            key = layer.kind, tuple(tuple(p.shape) for module in modules for p in module.parameters())
            with _Awake(modules, device=device):
                if hasattr(model.module, "materialise_buffers"):
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


class _Awake:
    """Gives the parameters of modules on the meta device small random values on `device`, and takes them away again."""

    def __init__(self, modules: list[nn.Module], *, device: torch.device) -> None:
        self._owners = [(owner, name) for module in modules for owner in module.modules() for name in owner._parameters]
        self._device = device
        self._before: list[tuple[nn.Module, str, nn.Parameter]] = []

    def __enter__(self) -> None:
        made: dict[nn.Parameter, nn.Parameter] = {}
        for owner, name in self._owners:
            parameter = owner._parameters[name]
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in made:
                values = torch.randn(parameter.shape, device=self._device) * 0.02
                made[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            self._before.append((owner, name, parameter))
            owner._parameters[name] = made[parameter]

    def __exit__(self, *_) -> None:
        for owner, name, parameter in self._before:
            owner._parameters[name] = parameter
