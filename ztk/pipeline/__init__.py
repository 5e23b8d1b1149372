"""Pipeline parallelism: schedules as data, partitioning of layers into stages."""

from ztk.pipeline.actions import Action, Kind
from ztk.pipeline.schedule import Schedule, ScheduleName, make_inference_schedule, make_schedule
from ztk.pipeline.simulate import Costs, Interval, Timeline, bubble_share, zero_bubble_share

__all__ = [
    "Action",
    "Costs",
    "Interval",
    "Kind",
    "Schedule",
    "ScheduleName",
    "Timeline",
    "bubble_share",
    "make_inference_schedule",
    "make_schedule",
    "zero_bubble_share",
]
