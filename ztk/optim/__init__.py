"""Optimizers of a single shard, fused or any elementwise one of torch; the grouping of parameters; learning rate schedules. No ranks."""

from ztk.core.policies.optimizer import OptimizerPolicy, ParameterGroup
from ztk.core.policies.schedule import SchedulePolicy
from ztk.optim.flat import FlatOptimizer, flat_optimizer
from ztk.optim.groups import GroupTable, HyperParameters, group_parameters
from ztk.optim.schedule import lr_multiplier, lr_table
from ztk.optim.torch_step import TorchStep

__all__ = [
    "FlatOptimizer",
    "GroupTable",
    "HyperParameters",
    "OptimizerPolicy",
    "ParameterGroup",
    "SchedulePolicy",
    "TorchStep",
    "flat_optimizer",
    "group_parameters",
    "lr_multiplier",
    "lr_table",
]
