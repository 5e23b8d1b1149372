"""Detects runs that are started again after their end."""

from pathlib import Path

from ztk.config import Config
from ztk.report.status import Status, read_status, read_summary


def is_finished(config: Config) -> bool:
    """Returns whether a run that continues in its own folder has already completed its `train.steps` steps."""
    folder, given = Path(config.output_dir), config.checkpoint.resume
    if given is None or (given != "auto" and Path(given) != folder) or read_status(folder) is not Status.done:
        return False
    return read_summary(folder).get("steps", 0) >= config.train.steps
