"""Mixtures of experts: DeepSpeed's layer, and the distribution of any layer's experts over ranks."""

from ztk.parallel.moe.groups import (
    configure_moe_param_groups,
    has_moe_layers,
    is_moe_param,
    is_moe_param_group,
    split_params_into_different_moe_groups_for_optimizer,
    split_params_into_shared_and_expert_params,
)
from ztk.parallel.moe.layer import MoE
from ztk.parallel.moe.metrics import expert_metrics, metrics_of_experts
from ztk.parallel.moe.shard import expert_layers, shard_experts

__all__ = [
    "MoE",
    "configure_moe_param_groups",
    "expert_layers",
    "expert_metrics",
    "has_moe_layers",
    "is_moe_param",
    "is_moe_param_group",
    "metrics_of_experts",
    "shard_experts",
    "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
]
