"""Where the real model is that `pytest -m real` needs."""

import os
from pathlib import Path


def default_folder() -> Path:
    """`ZTK_REAL_MODEL`, or a folder in the user's cache."""
    named = os.environ.get("ZTK_REAL_MODEL")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "ztk" / "smollm2"
