"""Low-rank adapters of DeepSpeed-Chat's scripts, temporarily merged into the weights of their layers."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ztk.deepspeed.zero.gathered import pin, unpin_unchanged

_PARAMETERS = ("weight", "lora_left_weight", "lora_right_weight")
_ATTRIBUTES = (*_PARAMETERS, "lora_scaling", "fuse_lora")


class FusedAdapters:
    """Merges weight + scaling * (right @ left)^T in every layer of `model` with these parameters and a flag `fuse_lora`, which its
    forward reads.

    Copies of the base weights are kept, so that `unfuse` restores them bitwise. The shards never change.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._bases: dict[Any, Tensor] = {}  # copies by layer

    @property
    def is_fused(self) -> bool:
        """Whether the adapters are merged."""
        return bool(self._bases)

    def fuse(self) -> None:
        """Merges the adapters. Idempotent.

        A collective call if parameters are sharded: the layers' parameters stay gathered until `unfuse`.
        """
        if self.is_fused:
            return
        layers = [layer for layer in adapted_layers(self._model).values() if not layer.fuse_lora]
        pin(_parameters(layers))
        with torch.no_grad():
            for layer in layers:
                self._bases[layer] = layer.weight.detach().clone()
                left, right = layer.lora_left_weight, layer.lora_right_weight
                layer.weight.data.copy_(_merged(layer.weight, left=left, right=right, scaling=layer.lora_scaling))
                layer.fuse_lora = True

    def unfuse(self) -> None:
        """Restores the bits from before `fuse`, if it was called. A collective call."""
        layers = list(self._bases)
        for layer in layers:
            layer.weight.data.copy_(self._bases.pop(layer))
            layer.fuse_lora = False
        unpin_unchanged(_parameters(layers))


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Returns the layers of `model` with an adapter, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if all(hasattr(module, attribute) for attribute in _ATTRIBUTES)
    }


def merged_parameters(
    model: nn.Module, *, read: Callable[[], Iterator[tuple[str, Tensor]]]
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, value of any shape) of the parameters of `model` with adapters merged into the weights, as `fuse` does, in the
    weight's dtype.

    read: yields (name, full value) of all parameters. A value need only be valid until the next.
    """
    layers = adapted_layers(model)
    parts = {f"{name}.{leaf}" for name in layers for leaf in _PARAMETERS}
    kept = {}
    for name, value in read():
        if name in parts:
            kept[name] = value.detach().clone()
        else:
            yield name, value
    for name, layer in layers.items():
        weight, left, right = (kept[f"{name}.{leaf}"] for leaf in _PARAMETERS)
        yield f"{name}.weight", _merged(weight, left=left, right=right, scaling=layer.lora_scaling)


def _merged(weight: Tensor, *, left: Tensor, right: Tensor, scaling: float) -> Tensor:
    product = right.detach().float() @ left.detach().float()
    return (weight.detach().float() + scaling * product.t()).to(weight.dtype)


def _parameters(layers: list) -> list[nn.Parameter]:
    return [getattr(layer, name) for layer in layers for name in _PARAMETERS]
