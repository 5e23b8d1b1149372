"""Single-shard optimizers, the grouping of parameters, and learning rate schedules. They know no ranks."""

from ztk.optim.flat import FlatOptimizer, flat_optimizer
from ztk.optim.groups import GroupTable, HyperParameters, group_parameters
from ztk.optim.policy import OptimizerPolicy, ParameterGroup
from ztk.optim.schedule import SchedulePolicy, lr_multiplier, lr_table

__all__ = [
    "FlatOptimizer",
    "GroupTable",
    "HyperParameters",
    "OptimizerPolicy",
    "ParameterGroup",
    "SchedulePolicy",
    "flat_optimizer",
    "group_parameters",
    "lr_multiplier",
    "lr_table",
]
