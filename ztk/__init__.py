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
    from ztk.core.policies.ema import EmaPolicy as EmaPolicy
    from ztk.core.policies.hardware import Hardware as Hardware
    from ztk.core.policies.zero import ZeroPolicy as ZeroPolicy
    from ztk.core.precision import LossScalePolicy as LossScalePolicy
    from ztk.core.precision import PrecisionPolicy as PrecisionPolicy
    from ztk.core.runtime import Process as Process
    from ztk.core.runtime import Topology as Topology
    from ztk.core.runtime.logged import log as log
    from ztk.core.runtime.part import Part as Part
    from ztk.deepspeed import initialize as initialize
    from ztk.inference import Generator as Generator
    from ztk.inference import InferencePolicy as InferencePolicy
    from ztk.inference import SamplingParams as SamplingParams
    from ztk.optim import OptimizerPolicy as OptimizerPolicy
    from ztk.optim import ParameterGroup as ParameterGroup
    from ztk.optim import SchedulePolicy as SchedulePolicy
    from ztk.optim import lr_table as lr_table
    from ztk.parallel.apply import parallelize as parallelize
    from ztk.parallel.pipeline import LayerSpec as LayerSpec
    from ztk.parallel.pipeline import MicroBatch as MicroBatch
    from ztk.parallel.pipeline import PipelineModule as PipelineModule
    from ztk.parallel.pipeline import PipelinePolicy as PipelinePolicy
    from ztk.parallel.pipeline import TiedLayerSpec as TiedLayerSpec
    from ztk.parallel.recompute import RecomputePolicy as RecomputePolicy
    from ztk.parallel.tensor import TensorPolicy as TensorPolicy
    from ztk.planner import Plan as Plan
    from ztk.planner import plan as plan
    from ztk.report import load as load
    from ztk.train.engine import Engine as Engine
    from ztk.train.loop import Callback as Callback
    from ztk.train.loop import Loop as Loop
    from ztk.zero.offload import OffloadPolicy as OffloadPolicy

_HOMES = {
    "Callback": "ztk.train.loop",
    "EmaPolicy": "ztk.core.policies.ema",
    "Engine": "ztk.train.engine",
    "Generator": "ztk.inference",
    "Hardware": "ztk.core.policies.hardware",
    "InferencePolicy": "ztk.inference",
    "LayerSpec": "ztk.parallel.pipeline",
    "Loop": "ztk.train.loop",
    "LossScalePolicy": "ztk.core.precision",
    "MicroBatch": "ztk.parallel.pipeline",
    "OffloadPolicy": "ztk.zero.offload",
    "OptimizerPolicy": "ztk.optim",
    "ParameterGroup": "ztk.optim",
    "Part": "ztk.core.runtime.part",
    "PipelineModule": "ztk.parallel.pipeline",
    "PipelinePolicy": "ztk.parallel.pipeline",
    "Plan": "ztk.planner",
    "PrecisionPolicy": "ztk.core.precision",
    "Process": "ztk.core.runtime",
    "RecomputePolicy": "ztk.parallel.recompute",
    "RunFailed": "ztk.cli.calls",
    "SamplingParams": "ztk.inference",
    "SchedulePolicy": "ztk.optim",
    "TensorPolicy": "ztk.parallel.tensor",
    "TiedLayerSpec": "ztk.parallel.pipeline",
    "Topology": "ztk.core.runtime",
    "ZeroPolicy": "ztk.core.policies.zero",
    "initialize": "ztk.deepspeed",
    "load": "ztk.report",
    "log": "ztk.core.runtime.logged",
    "lr_table": "ztk.optim",
    "parallelize": "ztk.parallel.apply",
    "plan": "ztk.planner",
    "plan_run": "ztk.cli.plans",
    "run": "ztk.cli.calls",
    "search_layouts": "ztk.cli.plans",
    "sweep": "ztk.cli.calls",
}

__all__ = sorted(_HOMES)


if not TYPE_CHECKING:  # so that a type checker reports a misspelt name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'ztk' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
