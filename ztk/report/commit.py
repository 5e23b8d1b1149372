"""Finds the commit of the running checkout."""

import subprocess
from pathlib import Path


def read_commit() -> str | None:
    """Returns the commit of the checkout that contains this file, with a + for uncommitted changes, or None without git.

    A package that is installed below another repository, such as in its .venv, has no commit.
    """
    here = Path(__file__)
    try:
        _git("ls-files", "--error-unmatch", here.name, folder=here.parent)
        return _git("describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*", folder=here.parent)
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str, folder: Path) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
