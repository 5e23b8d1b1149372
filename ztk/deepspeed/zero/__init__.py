"""Functions of `deepspeed.zero` and `deepspeed.utils` for sharded parameters. `names/table.py` lists the modules of its names."""

from typing import TYPE_CHECKING, Any

from ztk.deepspeed.names.tree import lookup, names_of

if TYPE_CHECKING:
    from ztk.deepspeed.zero.gathered import DeepSpeedZeRoOffload as DeepSpeedZeRoOffload
    from ztk.deepspeed.zero.gathered import GatheredParameters as GatheredParameters
    from ztk.deepspeed.zero.gathered import register_external_parameter as register_external_parameter
    from ztk.deepspeed.zero.gathered import unregister_external_parameter as unregister_external_parameter
    from ztk.deepspeed.zero.gathered import unwrap_model_for_generation as unwrap_model_for_generation
    from ztk.deepspeed.zero.init import DeepSpeedTensorOverride as DeepSpeedTensorOverride
    from ztk.deepspeed.zero.init import Init as Init
    from ztk.deepspeed.zero.parameter import ZeroParamStatus as ZeroParamStatus
    from ztk.deepspeed.zero.parameter import ZeroParamType as ZeroParamType
    from ztk.deepspeed.zero.states import safe_get_full_fp32_param as safe_get_full_fp32_param
    from ztk.deepspeed.zero.states import safe_get_full_grad as safe_get_full_grad
    from ztk.deepspeed.zero.states import safe_get_full_optimizer_state as safe_get_full_optimizer_state
    from ztk.deepspeed.zero.states import safe_get_local_fp32_param as safe_get_local_fp32_param
    from ztk.deepspeed.zero.states import safe_get_local_grad as safe_get_local_grad
    from ztk.deepspeed.zero.states import safe_get_local_optimizer_state as safe_get_local_optimizer_state
    from ztk.deepspeed.zero.states import safe_set_full_fp32_param as safe_set_full_fp32_param
    from ztk.deepspeed.zero.states import safe_set_full_grad as safe_set_full_grad
    from ztk.deepspeed.zero.states import safe_set_full_optimizer_state as safe_set_full_optimizer_state
    from ztk.deepspeed.zero.states import safe_set_local_fp32_param as safe_set_local_fp32_param
    from ztk.deepspeed.zero.states import safe_set_local_grad as safe_set_local_grad
    from ztk.deepspeed.zero.states import safe_set_local_optimizer_state as safe_set_local_optimizer_state
    from ztk.deepspeed.zero.states import safe_update_full_grad_vectorized as safe_update_full_grad_vectorized

__all__ = names_of("deepspeed.zero")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return lookup(name, "deepspeed.zero")
