"""Finds the run that a folder belongs to, by the configuration file in the run's folder."""

import os
from pathlib import Path


def record_of(folder: str | os.PathLike) -> Path | None:
    """Returns the configuration file in a run's folder, or None."""
    path = Path(folder, "config.yaml")
    return path if path.is_file() else None


def run_folder(path: str | os.PathLike) -> Path | None:
    """Returns the absolute folder of the run that contains `path`: the folder itself, a checkpoint, or a folder in a checkpoint."""
    folder = Path(path).expanduser().absolute()
    return next((place for place in (folder, *folder.parents[:3]) if record_of(place)), None)


def run_record(path: str | os.PathLike) -> Path | None:
    """Returns the configuration file of the run that contains `path`, or None."""
    folder = run_folder(path)
    return None if folder is None else record_of(folder)
