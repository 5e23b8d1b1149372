"""The door for scripts written for DeepSpeed: `import ztk.deepspeed as deepspeed`.

    engine, optimizer, _, _ = deepspeed.initialize(model=model, config="ds_config.json")
    for x, y in batches:
        loss = criterion(engine(x), y)
        engine.backward(loss)
        engine.step()

docs/deepspeed.md says what works and what is refused.
"""

from ztk.deepspeed import zero
from ztk.deepspeed.arguments import add_config_arguments, init_distributed
from ztk.deepspeed.config import DeepSpeedConfigError
from ztk.deepspeed.engine import DeepSpeedEngine
from ztk.deepspeed.entry import initialize
from ztk.deepspeed.schedules import VALID_LR_SCHEDULES
from ztk.deepspeed.zero import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

__all__ = [
    "VALID_LR_SCHEDULES",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_optimizer_state",
    "zero",
]
