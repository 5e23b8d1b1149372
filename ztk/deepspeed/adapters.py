"""Low-rank adapters as DeepSpeed-Chat's scripts write them, merged into the weights that they belong to for a while."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ztk.deepspeed.zero.gathered import pin, unpin_unchanged

_ATTRIBUTES = ("weight", "lora_left_weight", "lora_right_weight", "lora_scaling", "fuse_lora")


class FusedAdapters:
    """weight + scaling * (right @ left)^T for every layer of `model` that has these three and a flag `fuse_lora`, which its forward reads.

    Base weights are kept beside, so that `unfuse` gives their bits back; what is stored never changes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._bases: dict[Any, Tensor] = {}  # by layer

    @property
    def is_fused(self) -> bool:
        """Whether `fuse` was called last."""
        return bool(self._bases)

    def fuse(self) -> None:
        """A collective call where parameters are sharded: those of the layers stay gathered until `unfuse`. A second call does nothing."""
        if self.is_fused:
            return
        layers = [layer for layer in _layers(self._model) if not layer.fuse_lora]
        pin(_parameters(layers))
        with torch.no_grad():
            for layer in layers:
                self._bases[layer] = layer.weight.detach().clone()
                product = layer.lora_right_weight.float() @ layer.lora_left_weight.float()
                layer.weight.data.copy_(layer.weight.float() + layer.lora_scaling * product.t())
                layer.fuse_lora = True

    def unfuse(self) -> None:
        """The bits from before `fuse`, without which it does nothing. A collective call."""
        layers = list(self._bases)
        for layer in layers:
            layer.weight.data.copy_(self._bases.pop(layer))
            layer.fuse_lora = False
        unpin_unchanged(_parameters(layers))


def _layers(model: nn.Module) -> Iterator:
    return (module for module in model.modules() if all(hasattr(module, name) for name in _ATTRIBUTES))


def _parameters(layers: list) -> list[nn.Parameter]:
    return [getattr(layer, name) for layer in layers for name in ("weight", "lora_left_weight", "lora_right_weight")]
