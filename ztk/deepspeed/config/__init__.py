"""`ds_config.json`: every key takes effect, is accepted with a note, or is rejected. All faults are reported at once.

The tables of keys are in files by subject. `parse_config` converts a configuration to the engine's policies.
"""

from ztk.deepspeed.config.keys import DeepSpeedConfigError
from ztk.deepspeed.config.optimizer import ScheduleChoice
from ztk.deepspeed.config.settings import Settings, parse_config
from ztk.deepspeed.config.source import read_source
from ztk.deepspeed.config.top import BatchSizes

__all__ = ["BatchSizes", "DeepSpeedConfigError", "ScheduleChoice", "Settings", "parse_config", "read_source"]
