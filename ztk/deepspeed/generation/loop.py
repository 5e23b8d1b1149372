"""Generates texts from an engine's sharded parameters with transformers' `generate` over gathered weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ztk.rl.rollout.weights import RolloutWeights, rollout_weights
from ztk.train.engine import Engine


def generate(model: nn.Module, *args: Any, weights: RolloutWeights = RolloutWeights.whole, **options: Any) -> Tensor:
    """Runs the model's `generate` without gradients and in eval mode. Returns tokens [B, T]. A collective call if parameters are sharded.

    Ranks may generate different numbers of tokens.

    model: a DeepSpeed engine, or any object with such a model as `module`. weights: gathered once, or for every forward.

    Raises:
        ValueError: the module has no `generate`.
    """
    module: Any = model.module
    method = getattr(
        type(module), "generate", None
    )  # the class's method, because an engine may have replaced the instance's
    if method is None:
        raise ValueError(f"{type(module).__name__} has no generate(): pass a causal language model of transformers")
    with evaluating(model, weights=weights):
        return method(module, *args, **({"synced_gpus": _goes_on_for_others(model)} | options))


@contextmanager
def evaluating(model: nn.Module, *, weights: RolloutWeights = RolloutWeights.whole) -> Iterator[None]:
    """Prepares `model.module` for forwards without gradients in eval mode."""
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
    """Returns whether a finished rank must continue its forwards, because other ranks' forwards gather parameters."""
    engine = getattr(model, "engine", None)
    sharded = isinstance(engine, Engine) and engine.zero.policy.shards_parameters
    return sharded and dist.is_initialized() and dist.get_world_size() > 1
