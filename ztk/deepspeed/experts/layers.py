"""Applies the configuration's section `moe` to a model's `MoE` layers, and derives the mesh from them."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from ztk.parallel.moe import MoE

# Arguments of `MoE` -> fields of its policy. The others are attributes of the layer, or built into it.
_IN_POLICY = {
    **{name: name for name in ("k", "capacity_factor", "eval_capacity_factor", "min_capacity", "drop_tokens")},
    "noisy_gate_policy": "noise",
    "use_rts": "random_selection",
    "top2_2nd_expert_sampling": "sample_second",
}
_DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(MoE.__init__).parameters.items()}


def give_layer_options(model: nn.Module, *, options: Mapping[str, Any]) -> None:
    """Changes the layers in place, or none of them if one raises. An argument that equals its default counts as not given.

    Raises ValueError for a layer with a value that differs from the configuration's, and for arguments that need a rebuilt layer.
    """
    layers = [(name or "the model", module) for name, module in model.named_modules() if isinstance(module, MoE)]
    for name, layer in layers:
        for key, value in options.items():
            _check(layer, name=name, key=key, value=value)
    for _, layer in layers:
        policy = {_IN_POLICY[key]: value for key, value in options.items() if key in _IN_POLICY}
        layer.policy = replace(layer.policy, **policy)
        if "ep_size" in options:
            layer.ep_size = options["ep_size"]
            for parameter in layer.experts.parameters():
                # pyrefly: ignore[missing-attribute]  # the mark of DeepSpeed's expert parameters
                parameter.group_name = f"ep_size_{layer.ep_size}"


def _check(layer: MoE, *, name: str, key: str, value: object) -> None:
    own = _value_of(layer, key=key)
    if own == value:
        return
    if own != _DEFAULTS[key]:
        raise ValueError(
            f"moe.{key}={value}: {name} is made with MoE({key}={own}); make them equal, or give one of them"
        )
    if key in ("num_experts", "use_residual"):
        raise ValueError(f"moe.{key}={value}: {name} is built without it; make the layer with MoE({key}={value})")
    experts = layer.num_experts
    if (key == "ep_size" and experts % value) or (key == "k" and value > experts):
        raise ValueError(f"moe.{key}={value}: does not fit {name}, which has {experts} experts")


def _value_of(layer: MoE, *, key: str) -> object:
    if key in _IN_POLICY:
        return getattr(layer.policy, _IN_POLICY[key])
    return layer.mlp is not None if key == "use_residual" else getattr(layer, key)


def expert_degree(model: nn.Module, *, at_least: int = 1) -> int:
    """Returns the ranks over which experts are spread: the layers' `ep_size`, or `at_least` from the configuration.

    Raises ValueError for different sizes. A size of 1, all experts on every rank, does not conflict with others.
    """
    sizes = sorted({module.ep_size for module in model.modules() if isinstance(module, MoE)} | {at_least})
    sizes = [size for size in sizes if size > 1]
    if len(sizes) > 1:
        raise ValueError(
            f"experts over {' and '.join(map(str, sizes))} ranks: one model has one expert axis; use the same ep_size (and "
            "expert_parallel.autoep_size), or 1"
        )
    return sizes[0] if sizes else 1
