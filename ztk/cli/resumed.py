"""A run that is started again after its end."""

from pathlib import Path

from ztk.config import Config
from ztk.report.status import Status, read_status, read_summary


def is_finished(config: Config) -> bool:
    """Whether `checkpoint.resume=auto` has nothing left to do: the folder's run is done and has made `train.steps` steps."""
    folder = Path(config.output_dir)
    if config.checkpoint.resume != "auto" or read_status(folder) is not Status.done:
        return False
    return read_summary(folder).get("steps", 0) >= config.train.steps
