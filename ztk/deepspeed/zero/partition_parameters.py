"""`deepspeed.runtime.zero.partition_parameters`: the names that libraries take from there."""

from collections.abc import Callable

import torch

from ztk.deepspeed.device import get_accelerator
from ztk.deepspeed.engine_names import is_zero_param
from ztk.deepspeed.zero.external import register_external_parameter, unregister_external_parameter
from ztk.deepspeed.zero.gathered import GatheredParameters
from ztk.deepspeed.zero.init import DeepSpeedTensorOverride, Init
from ztk.deepspeed.zero.parameter import ZeroParamStatus, ZeroParamType

__all__ = [
    "DeepSpeedTensorOverride",
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "get_accelerator",
    "is_zero_param",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

_orig_torch_arange = torch.arange  # transformers compares with it when it replaces the wrapper below


def zero_wrapper_for_fp_tensor_constructor(fn: Callable, target_fp_dtype: torch.dtype | None) -> Callable:
    """A constructor like `fn` whose floating-point tensors have target_fp_dtype. DeepSpeed's Init replaces torch's constructors by such
    ones, transformers replaces this function; ztk's Init leaves torch alone and does not call it."""

    def wrapped(*args, **kwargs) -> torch.Tensor:
        tensor = fn(*args, **kwargs)
        return tensor.to(target_fp_dtype) if target_fp_dtype is not None and tensor.is_floating_point() else tensor

    return wrapped
