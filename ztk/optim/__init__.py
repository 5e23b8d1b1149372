"""Optimizers of a single shard, fused or an elementwise one of torch; torch optimizers of full parameters; the grouping of parameters;
learning rate schedules. No ranks."""

from ztk.core.policies.optimizer import OptimizerPolicy, ParameterGroup
from ztk.core.policies.schedule import SchedulePolicy
from ztk.optim.flat import FlatOptimizer, flat_optimizer
from ztk.optim.groups import GroupTable, HyperParameters, group_parameters
from ztk.optim.schedule import GroupSchedule, lr_multiplier, lr_table
from ztk.optim.torch_step import TorchStep
from ztk.optim.whole_step import WholeStep

__all__ = [
    "FlatOptimizer",
    "GroupSchedule",
    "GroupTable",
    "HyperParameters",
    "OptimizerPolicy",
    "ParameterGroup",
    "SchedulePolicy",
    "TorchStep",
    "WholeStep",
    "flat_optimizer",
    "group_parameters",
    "lr_multiplier",
    "lr_table",
]
