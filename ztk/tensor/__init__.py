"""Tensor parallelism: each layer's weights cut over the `tp` ranks, which work on the same batch. Applied to a plain module from outside."""

from ztk.tensor.heads import Heads, is_attention
from ztk.tensor.plan import TensorPlan, plan_of
from ztk.tensor.policy import TensorPolicy
from ztk.tensor.rules import Style, TensorRule
from ztk.tensor.shard import shard_tensors

__all__ = [
    "Heads",
    "Style",
    "TensorPlan",
    "TensorPolicy",
    "TensorRule",
    "is_attention",
    "plan_of",
    "shard_tensors",
]
