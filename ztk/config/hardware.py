"""Looks up hardware by the name of its option, outside of runs."""

from pathlib import Path
from typing import Any

import yaml

from ztk.config.compose import conf_dir
from ztk.core.policies.hardware import HERE, read_measured


def hardware_values(name: str) -> dict[str, Any]:
    """Returns keyword arguments of `ztk.Hardware` for the option `name` of the group hardware.

    Raises:
        ValueError: there is no such option, or hardware=here has not been measured.
    """
    if name == HERE:
        return read_measured()
    folder = Path(conf_dir(), "hardware")
    path = folder / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(
            f"hardware={name}: must be one of {', '.join(sorted(file.stem for file in folder.glob('*.yaml')))}"
        )
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    texts = ("name", "source")  # YAML parses 1e9 as text
    return {
        key: float(value) if isinstance(value, str) and key not in texts else value for key, value in values.items()
    }
