"""Pipeline parallelism: schedules as data, and the partitioning of layers into stages."""

from ztk.core.policies.pipeline import PipelinePolicy, ScheduleName
from ztk.parallel.pipeline.actions import Action, Kind
from ztk.parallel.pipeline.layers import MicroBatch
from ztk.parallel.pipeline.module import LayerSpec, PipelineModule, TiedLayerSpec
from ztk.parallel.pipeline.schedule import Schedule, make_inference_schedule, make_schedule
from ztk.parallel.pipeline.simulate import Costs, Interval, Timeline, bubble_share, zero_bubble_share

__all__ = [
    "Action",
    "Costs",
    "Interval",
    "Kind",
    "LayerSpec",
    "MicroBatch",
    "PipelineModule",
    "PipelinePolicy",
    "Schedule",
    "ScheduleName",
    "TiedLayerSpec",
    "Timeline",
    "bubble_share",
    "make_inference_schedule",
    "make_schedule",
    "zero_bubble_share",
]
