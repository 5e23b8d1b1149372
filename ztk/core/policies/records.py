"""Finds files by their folder: the configuration of the run that contains it, and the weights of a model of transformers."""

import json
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


def weight_files(folder: str | os.PathLike) -> list[Path]:
    """Returns the safetensors files of a model saved by `save_pretrained`: those of its index, which may be missing, or the single one.

    The list is empty if the folder has neither an index nor `model.safetensors`.
    """
    index, single = Path(folder, "model.safetensors.index.json"), Path(folder, "model.safetensors")
    if index.is_file():
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [Path(folder, name) for name in sorted(set(places.values()))]
    return [single] if single.is_file() else []
