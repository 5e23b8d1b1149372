"""Pipelines under DeepSpeed's names: `deepspeed.pipe`."""

from ztk.deepspeed.pipe.module import PipelineModule
from ztk.deepspeed.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from ztk.parallel.pipeline import LayerSpec, TiedLayerSpec

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "PipelineParallelGrid",
    "ProcessTopology",
    "TiedLayerSpec",
]
