"""Finds the commit of the running checkout."""

import subprocess
from pathlib import Path


def read_commit() -> str | None:
    """Returns the commit of the checkout that contains this file, with a + for uncommitted changes, or None without git."""
    where = ("git", "-C", str(Path(__file__).parent))
    command = [*where, "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
