"""What `deepspeed.zero` and `deepspeed.utils` offer about sharded parameters."""

from ztk.deepspeed.zero.estimates import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from ztk.deepspeed.zero.external import register_external_parameter, unregister_external_parameter
from ztk.deepspeed.zero.gathered import GatheredParameters
from ztk.deepspeed.zero.hooks import DeepSpeedZeRoOffload, unwrap_model_for_generation
from ztk.deepspeed.zero.init import DeepSpeedTensorOverride, Init
from ztk.deepspeed.zero.local import (
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from ztk.deepspeed.zero.parameter import ZeroParamStatus, ZeroParamType
from ztk.deepspeed.zero.states import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_update_full_grad_vectorized,
)
from ztk.deepspeed.zero.tiling import TiledLinear, TiledLinearReturnBias

__all__ = [
    "DeepSpeedTensorOverride",
    "DeepSpeedZeRoOffload",
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "ZeroParamType",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]
