"""ztk: train models larger than one device. The library's interface.

    engine = ztk.parallelize(model, process=ztk.Process.start(), optimizer=ztk.OptimizerPolicy(lr=3e-4),
                             zero=ztk.ZeroPolicy(stage=3), offload=ztk.OffloadPolicy(optimizer="cpu"))
    for tokens, targets in batches:
        engine.backward(engine(tokens, targets))
        engine.step()

Names are imported when they are first used: `import ztk` alone loads neither torch nor anything else, and the process that starts the ranks
stays small.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ztk.cli.calls import RunFailed as RunFailed
    from ztk.cli.calls import run as run
    from ztk.cli.calls import sweep as sweep
    from ztk.cli.plans import plan_run as plan_run
    from ztk.cli.plans import search_layouts as search_layouts
    from ztk.deepspeed import initialize as initialize
    from ztk.engine import Engine as Engine
    from ztk.inference import Generator as Generator
    from ztk.inference import InferencePolicy as InferencePolicy
    from ztk.inference import SamplingParams as SamplingParams
    from ztk.offload import OffloadPolicy as OffloadPolicy
    from ztk.optim import OptimizerPolicy as OptimizerPolicy
    from ztk.optim import ParameterGroup as ParameterGroup
    from ztk.optim import SchedulePolicy as SchedulePolicy
    from ztk.optim import lr_table as lr_table
    from ztk.parallel import parallelize as parallelize
    from ztk.pipeline import LayerSpec as LayerSpec
    from ztk.pipeline import MicroBatch as MicroBatch
    from ztk.pipeline import PipelineModule as PipelineModule
    from ztk.pipeline import PipelinePolicy as PipelinePolicy
    from ztk.pipeline import TiedLayerSpec as TiedLayerSpec
    from ztk.planner import Plan as Plan
    from ztk.planner import plan as plan
    from ztk.policies.ema import EmaPolicy as EmaPolicy
    from ztk.policies.hardware import Hardware as Hardware
    from ztk.precision import LossScalePolicy as LossScalePolicy
    from ztk.precision import PrecisionPolicy as PrecisionPolicy
    from ztk.recompute import RecomputePolicy as RecomputePolicy
    from ztk.report import load as load
    from ztk.runtime import Process as Process
    from ztk.runtime import Topology as Topology
    from ztk.runtime.part import Part as Part
    from ztk.tensor import TensorPolicy as TensorPolicy
    from ztk.train import Callback as Callback
    from ztk.train import Loop as Loop
    from ztk.zero import ZeroPolicy as ZeroPolicy

_HOMES = {
    "Callback": "ztk.train",
    "EmaPolicy": "ztk.policies.ema",
    "Engine": "ztk.engine",
    "Generator": "ztk.inference",
    "Hardware": "ztk.policies.hardware",
    "InferencePolicy": "ztk.inference",
    "LayerSpec": "ztk.pipeline",
    "Loop": "ztk.train",
    "LossScalePolicy": "ztk.precision",
    "MicroBatch": "ztk.pipeline",
    "OffloadPolicy": "ztk.offload",
    "OptimizerPolicy": "ztk.optim",
    "ParameterGroup": "ztk.optim",
    "Part": "ztk.runtime.part",
    "PipelineModule": "ztk.pipeline",
    "PipelinePolicy": "ztk.pipeline",
    "Plan": "ztk.planner",
    "PrecisionPolicy": "ztk.precision",
    "Process": "ztk.runtime",
    "RecomputePolicy": "ztk.recompute",
    "RunFailed": "ztk.cli.calls",
    "SamplingParams": "ztk.inference",
    "SchedulePolicy": "ztk.optim",
    "TensorPolicy": "ztk.tensor",
    "TiedLayerSpec": "ztk.pipeline",
    "Topology": "ztk.runtime",
    "ZeroPolicy": "ztk.zero",
    "initialize": "ztk.deepspeed",
    "load": "ztk.report",
    "lr_table": "ztk.optim",
    "parallelize": "ztk.parallel",
    "plan": "ztk.planner",
    "plan_run": "ztk.cli.plans",
    "run": "ztk.cli.calls",
    "search_layouts": "ztk.cli.plans",
    "sweep": "ztk.cli.calls",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ztk' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
