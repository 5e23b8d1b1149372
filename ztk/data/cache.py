"""The folder for packed and tokenised text. Files and folders in it are complete whenever they exist."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path


def cache_folder(cache_dir: str | None) -> Path:
    """Returns the folder for packed and tokenised text: `cache_dir`, else ztk below $XDG_CACHE_HOME or ~/.cache."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ztk"


def built_once(target: Path, *, build: Callable[[Path], object]) -> Path:
    """Returns `target`, which one process builds under a lock while others wait.

    build: makes the file or folder at a path next to `target`, which is renamed. Files of a killed builder may be there.

    Raises ValueError if the cache cannot be written.
    """
    if target.exists():
        return target
    with writing(target.parent), open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process ends
        if not target.exists():
            unfinished = target.with_suffix(".building")
            build(unfinished)
            os.replace(unfinished, target)
    return target


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Makes a folder of the cache. Raises ValueError if it cannot be written, now or in the block."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ValueError(
            f"the cache cannot be written to {folder} ({error.strerror}); set XDG_CACHE_HOME to a folder that you may write to, on a disk "
            "with space"
        ) from error
