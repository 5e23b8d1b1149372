"""Finds the run that a folder belongs to and the weights in a model's folder, and replaces files."""

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
    """Returns the safetensors files of a model saved by `save_pretrained`: the files that its index lists, or the single file. Files of the
    index may be missing.

    The list is empty if the folder has neither an index nor `model.safetensors`.
    """
    index, single = Path(folder, "model.safetensors.index.json"), Path(folder, "model.safetensors")
    if index.is_file():
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [Path(folder, name) for name in sorted(set(places.values()))]
    return [single] if single.is_file() else []


def replace_file(path: Path, *, text: str) -> None:
    """Replaces a file atomically: no reader finds a part of it, also after the machine fails."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    with open(staging, "w", newline="", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(staging, path)
