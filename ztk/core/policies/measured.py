"""`hardware=here`: the numbers of this machine, in a file that `python -m ztk.calibrate` writes."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ztk.core.policies.hardware import NAMES

HERE = "here"
COMMAND = "python -m ztk.calibrate"


def measured_path(file: str | os.PathLike | None = None) -> Path:
    """`file`, else `ztk/hardware.json` below $XDG_CACHE_HOME or ~/.cache."""
    if file is not None:
        return Path(file).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ztk" / "hardware.json"


def read_measured(file: str | os.PathLike | None = None) -> dict[str, Any]:
    """Keywords of `Hardware`. file: see `measured_path`.

    Raises:
        ValueError: nobody has written the file, or it is no file of `python -m ztk.calibrate`.
    """
    path = measured_path(file)
    command = COMMAND if file is None else f"{COMMAND} --to {file}"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        values = content["hardware"]
    except FileNotFoundError:
        raise ValueError(f"hardware=here: {path} was never written: run `{command}`") from None
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise ValueError(f"hardware=here: {path} is no description of hardware ({error}): run `{command}`") from None
    if unknown := sorted(set(values) - {"name", *NAMES}):
        raise ValueError(f"hardware=here: {path} has unknown numbers, {', '.join(unknown)}: run `{command}`")
    return values


def write_measured(content: Mapping[str, Any], *, file: str | os.PathLike | None = None) -> Path:
    """Writes `content` (with the keys "hardware" and "sources") and returns the path; a reader sees the old file or the new one."""
    path = measured_path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)
    return path
