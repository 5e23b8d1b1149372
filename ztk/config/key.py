"""How the schema declares a key."""

from dataclasses import field
from typing import Any


def key(meaning: str, **default: Any) -> Any:
    """A key of the command line. `meaning` is its line in `--help GROUP` and on the configuration's page."""
    return field(metadata={"meaning": meaning}, **default)
