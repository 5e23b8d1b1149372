"""DeepSpeed's optimizer classes, for `isinstance`: which of them an engine's optimizer is follows from its stage and precision.

They have no instances of their own.
"""

from typing import Any

import torch

from ztk.deepspeed.optimizer import ShardedOptimizer


class _Kind(type):
    """A class whose instances are the engine's optimizers of its `stages` and `dtypes`; empty: of all."""

    stages: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]

    def __instancecheck__(cls, instance: Any) -> bool:
        if not isinstance(instance, ShardedOptimizer):
            return False
        stage, dtype = instance.stage, instance.compute_dtype
        return (not cls.stages or stage in cls.stages) and (not cls.dtypes or dtype in cls.dtypes)


def _kind(name: str, *, module: str, stages: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = ()) -> _Kind:
    return _Kind(name, (), {"__module__": f"deepspeed.runtime.{module}", "stages": stages, "dtypes": dtypes})


DeepSpeedOptimizer = _kind("DeepSpeedOptimizer", module="base_optimizer", stages=())
ZeROOptimizer = _kind("ZeROOptimizer", module="base_optimizer", stages=(1, 2, 3))
DeepSpeedZeroOptimizer = _kind("DeepSpeedZeroOptimizer", module="zero.stage_1_and_2", stages=(1, 2))
DeepSpeedZeroOptimizer_Stage3 = _kind("DeepSpeedZeroOptimizer_Stage3", module="zero.stage3", stages=(3,))
BF16_Optimizer = _kind("BF16_Optimizer", module="bf16_optimizer", stages=(0,), dtypes=(torch.bfloat16,))
FP16_Optimizer = _kind("FP16_Optimizer", module="fp16.fused_optimizer", stages=(0,), dtypes=(torch.float16,))
FP16_UnfusedOptimizer = _kind("FP16_UnfusedOptimizer", module="fp16.unfused_optimizer", stages=(-1,))  # never: no LAMB
