"""The compatibility layer for scripts written for DeepSpeed: `import ztk.deepspeed as deepspeed`.

    engine, optimizer, _, _ = deepspeed.initialize(model=model, config="ds_config.json")
    for x, y in batches:
        loss = criterion(engine(x), y)
        engine.backward(loss)
        engine.step()

`python -m ztk.deepspeed script.py` and `ztk.deepspeed.install()` make it importable as `deepspeed`. Names are imported on first use;
`ztk/deepspeed/names/table.py` lists them with their modules. docs/deepspeed.md describes which features are supported.
"""

from typing import TYPE_CHECKING, Any

from ztk.deepspeed.names.tree import lookup as _lookup
from ztk.deepspeed.names.tree import names_of as _names_of

if TYPE_CHECKING:  # the names of TOP in names/table.py and the submodules that scripts use, for editors
    from ztk.deepspeed import zero as zero
    from ztk.deepspeed.collectives import comm as comm
    from ztk.deepspeed.config import DeepSpeedConfigError as DeepSpeedConfigError
    from ztk.deepspeed.config.settings import DeepSpeedConfig as DeepSpeedConfig
    from ztk.deepspeed.engine.deepspeed_engine import DeepSpeedEngine as DeepSpeedEngine
    from ztk.deepspeed.generation.hybrid import DeepSpeedHybridEngine as DeepSpeedHybridEngine
    from ztk.deepspeed.names import install as install
    from ztk.deepspeed.optimizers.schedules import VALID_LR_SCHEDULES as VALID_LR_SCHEDULES
    from ztk.deepspeed.pipe import PipelineModule as PipelineModule
    from ztk.deepspeed.pipe.pipeline_engine import PipelineEngine as PipelineEngine
    from ztk.deepspeed.recompute import checkpointing as checkpointing
    from ztk.deepspeed.serving.config import DeepSpeedInferenceConfig as DeepSpeedInferenceConfig
    from ztk.deepspeed.serving.config import default_inference_config as default_inference_config
    from ztk.deepspeed.serving.entry import init_inference as init_inference
    from ztk.deepspeed.serving.inference_engine import InferenceEngine as InferenceEngine
    from ztk.deepspeed.start.entry import initialize as initialize
    from ztk.deepspeed.start.loader import RepeatingLoader as RepeatingLoader
    from ztk.deepspeed.start.mesh import tp_model_init as tp_model_init
    from ztk.deepspeed.start.process import add_config_arguments as add_config_arguments
    from ztk.deepspeed.start.process import init_distributed as init_distributed
    from ztk.deepspeed.tools.device import get_accelerator as get_accelerator
    from ztk.deepspeed.tools.helpers import OnDevice as OnDevice
    from ztk.deepspeed.tools.log import log_dist as log_dist
    from ztk.deepspeed.tools.log import logger as logger
    from ztk.deepspeed.version import __git_branch__ as __git_branch__
    from ztk.deepspeed.version import __git_hash__ as __git_hash__
    from ztk.deepspeed.version import __version__ as __version__
    from ztk.deepspeed.version import __version_major__ as __version_major__
    from ztk.deepspeed.version import __version_minor__ as __version_minor__
    from ztk.deepspeed.version import __version_patch__ as __version_patch__
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

__all__ = _names_of("deepspeed")


def __getattr__(name: str) -> Any:
    if name.startswith("__") and not name.startswith(("__version", "__git")):
        raise AttributeError(name)
    value = _lookup(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
