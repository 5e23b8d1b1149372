"""Pipeline parallelism: schedules as data, partitioning of layers into stages."""

from ztk.pipeline.actions import Action, Kind
from ztk.pipeline.layers import MicroBatch
from ztk.pipeline.module import LayerSpec, PipelineModule, TiedLayerSpec
from ztk.pipeline.schedule import Schedule, make_inference_schedule, make_schedule
from ztk.pipeline.simulate import Costs, Interval, Timeline, bubble_share, zero_bubble_share
from ztk.policies.pipeline import PipelinePolicy, ScheduleName

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
