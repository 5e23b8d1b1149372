"""Tensor parallelism: each layer's weights cut over the `tp` ranks, which work on the same batch. Applied to a plain module from outside."""

from ztk.core.policies.tensor import Style, TensorPolicy, TensorRule
from ztk.parallel.tensor.heads import Heads, is_attention
from ztk.parallel.tensor.shard import shard_tensors
from ztk.parallel.tensor.tensor_plan import TensorPlan, plan_of

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
