"""Single-shard optimizers, the grouping of parameters, and learning rate schedules. They know no ranks."""

from ztk.optim.flat import FlatOptimizer, flat_optimizer
from ztk.optim.groups import GroupTable, HyperParameters, group_parameters
from ztk.optim.schedule import lr_multiplier, lr_table
from ztk.policies.optimizer import OptimizerPolicy, ParameterGroup
from ztk.policies.schedule import SchedulePolicy

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
