"""Texts from an engine's parameters as they are sharded: transformers' `generate` over gathered weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ztk.rl.rollout.weights import RolloutWeights, rollout_weights
from ztk.train.engine import Engine


def generate(model: nn.Module, *args: Any, weights: RolloutWeights = RolloutWeights.whole, **options: Any) -> Tensor:
    """The model's `generate`, without gradients and in eval mode. A collective call where parameters are sharded. Tokens [B, T].

    model: a DeepSpeed engine, or anything with such a model as `module`. weights: gathered once, or for every forward. Ranks may end
    after different numbers of tokens.

    Raises:
        ValueError: a module without `generate`.
    """
    module: Any = model.module
    method = getattr(type(module), "generate", None)  # the class's: an engine may have put its own name into the object
    if method is None:
        raise ValueError(f"{type(module).__name__} has no generate(): pass a causal language model of transformers")
    with evaluating(model, weights=weights):
        return method(module, *args, **({"synced_gpus": _goes_on_for_others(model)} | options))


@contextmanager
def evaluating(model: nn.Module, *, weights: RolloutWeights = RolloutWeights.whole) -> Iterator[None]:
    """Inside, `model.module` runs forwards without gradients in eval mode."""
    engine = getattr(model, "engine", None)
    if isinstance(engine, Engine):
        with rollout_weights(engine, weights=weights):
            yield
        return
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _goes_on_for_others(model: nn.Module) -> bool:
    """A rank that is done computes on while others draw: their forwards gather parameters."""
    engine = getattr(model, "engine", None)
    sharded = isinstance(engine, Engine) and engine.zero.policy.shards_parameters
    return sharded and dist.is_initialized() and dist.get_world_size() > 1
