"""Finds the run that a folder belongs to, its checkpoints and the weights in a model's folder, and replaces files."""

import json
import os
import re
from pathlib import Path
from typing import Any

CHECKPOINTS, LATEST = (
    "checkpoints",
    "latest",
)  # folder of a run, and the file in it that names the checkpoint to continue from
OWN_RECORD = "run.yaml"  # in a checkpoint: the configuration of the run that saved it
MOST_VALUES = 1_000_000  # of a record, with those that aliases repeat
_STEP = re.compile(r"step-(\d{6,})(?:\.(\d+))?")


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


def step_number(name: str) -> tuple[int, int] | None:
    """Returns the step and the number of its save from a checkpoint folder's name, or None for another name."""
    found = _STEP.fullmatch(name)
    return (int(found[1]), int(found[2] or 1)) if found else None


def step_folders(folder: str | os.PathLike) -> list[Path]:
    """Returns the complete checkpoints in a folder of checkpoints, by step."""
    try:
        found = [child for child in Path(folder).iterdir() if step_number(child.name) and child.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=lambda child: step_number(child.name) or (0, 0))


def newest_checkpoint(run: str | os.PathLike) -> Path | None:
    """Returns the checkpoint from which the run of this folder continues, or None: the one in `latest`, or the newest if that is gone."""
    folder = Path(run, CHECKPOINTS)
    found = step_folders(folder)
    try:
        named = folder / (folder / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        named = None
    return named if named in found else found[-1] if found else None


def record_of_checkpoint(step: Path) -> Path | None:
    """Returns the configuration of the run that saved a checkpoint: the checkpoint's own, or its run's if an earlier version saved it."""
    own = step / OWN_RECORD
    return own if own.is_file() else run_record(step)


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


def check_aliases(root: Any) -> None:
    """Raises ValueError for a YAML document that repeats its parts by aliases without a bound, as one of a few lines can.

    root: the node that yaml.compose returns. Aliases share a node there, so the check takes as long as the text.
    """
    sizes: dict[int, int] = {}  # of a node's copy, by the node's identity; 0 while it is counted

    def size(node: Any) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = 0
            entries = node.value if isinstance(node.value, list) else []
            sizes[id(node)] = 1 + sum(
                size(one) for entry in entries for one in (entry if isinstance(entry, tuple) else (entry,))
            )
        elif not sizes[id(node)]:
            raise ValueError("an alias refers to a part that contains it")
        return sizes[id(node)]

    if root is not None and size(root) > MOST_VALUES:
        raise ValueError(f"its aliases repeat {size(root):.3g} values, more than {MOST_VALUES}")


def replace_file(path: Path, *, text: str) -> None:
    """Replaces a file atomically: no reader finds a part of it, also after the machine fails."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    with open(staging, "w", newline="", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(staging, path)
