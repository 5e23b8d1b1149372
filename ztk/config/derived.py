"""Values derived from the model, the data or the machine, with the reasons that the recorded configuration shows."""

from collections.abc import Mapping
from typing import Any

import yaml

from ztk.config.keys import write
from ztk.core.policies.config import Config


def derive(config: Config, *, key: str, value: Any, reason: str) -> None:
    """Sets a key that the user left open and stores the reason, a single line."""
    write(config, key=key, value=value)
    config.reasons[key] = reason


def explained(text: str, *, reasons: Mapping[str, str]) -> str:
    """Returns a YAML configuration with the reasons as comments. reasons: by dotted key."""
    lines, path = [], []
    for line in text.splitlines():
        name, is_key, _ = line.partition(":")
        depth = (len(name) - len(name.lstrip())) // 2
        reason = None
        if is_key and depth <= len(path):
            path[depth:] = [name.strip()]
            reason = None if line.endswith(": null") else reasons.get(".".join(path))
        if reason is None:
            lines.append(line)
        elif _is_whole(line):
            lines.append(f"{line}  # {reason}")
        else:  # the value continues on the next line
            lines += [f"{'  ' * depth}# {reason}", line]
    return "\n".join(lines) + "\n"


def _is_whole(line: str) -> bool:
    """Returns whether a line contains the full value of its key."""
    _, _, value = line.partition(":")
    try:
        return value.strip() not in ("", "|", "|-", ">", ">-") and yaml.safe_load(value) is not None
    except yaml.YAMLError:
        return False
