"""`ds_config.json`: every key takes effect, is accepted with a note, or is refused; all faults at once.

One file per section holds its table of keys. `parse_config` turns a configuration into the policies that the engine is built from.
"""

from ztk.deepspeed.config.batch import BatchSizes
from ztk.deepspeed.config.keys import DeepSpeedConfigError
from ztk.deepspeed.config.scheduler import ScheduleChoice
from ztk.deepspeed.config.settings import Settings, parse_config
from ztk.deepspeed.config.source import read_source

__all__ = ["BatchSizes", "DeepSpeedConfigError", "ScheduleChoice", "Settings", "parse_config", "read_source"]
