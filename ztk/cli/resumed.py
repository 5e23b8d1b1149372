"""A run that is started again after its end."""

from pathlib import Path

from ztk.config import Config
from ztk.report.status import Status, read_status, read_summary


def is_finished(config: Config) -> bool:
    """Whether a run that continues in its own folder has nothing left to do: it is done and has made `train.steps` steps."""
    folder, given = Path(config.output_dir), config.checkpoint.resume
    if given is None or (given != "auto" and Path(given) != folder) or read_status(folder) is not Status.done:
        return False
    return read_summary(folder).get("steps", 0) >= config.train.steps
