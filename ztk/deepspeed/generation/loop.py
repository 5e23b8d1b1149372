"""Generates texts from an engine's sharded parameters with transformers' `generate` over gathered weights."""

from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ztk.rl.rollout.weights import RolloutWeights, rollout_weights
from ztk.train.engine import Engine
from ztk.train.engine.batches import in_eval_mode


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


def evaluating(model: nn.Module, *, weights: RolloutWeights = RolloutWeights.whole) -> AbstractContextManager[None]:
    """Prepares `model.module` for forwards without gradients in eval mode."""
    engine = getattr(model, "engine", None)
    return rollout_weights(engine, weights=weights) if isinstance(engine, Engine) else in_eval_mode(model)


def _goes_on_for_others(model: nn.Module) -> bool:
    """Returns whether a finished rank must continue its forwards, because other ranks' forwards gather parameters."""
    engine = getattr(model, "engine", None)
    sharded = isinstance(engine, Engine) and engine.zero.policy.shards_parameters
    return sharded and dist.is_initialized() and dist.get_world_size() > 1
