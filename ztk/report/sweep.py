"""`sweep.json`: which jobs a sweep has and in which folders, written before the first one starts."""

import errno
import fcntl
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ztk.report.folder import write_json
from ztk.report.status import RecordError, Status, read_status

SWEEP = "sweep.json"
_UNSUPPORTED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepJob:
    """One run of a sweep.

    folder: its name below the sweep's: `hash`, for repeats `hash-1`, `hash-2`, ... overrides: of the command line. options: those that
    were added for this repeat, such as `train.seed=1`.
    """

    folder: str
    hash: str
    overrides: tuple[str, ...]
    repeat: int = 0
    options: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRecord:
    """A sweep as it was asked for.

    command: the command line as one text. flags, words: its parts, without `sweep.*` and the folder. grid: key -> its values.
    commit: of the checkout that started it. later_commits: of those that went on with it.
    """

    command: str
    flags: tuple[str, ...]
    words: tuple[str, ...]
    grid: Mapping[str, Sequence[str]]
    repeats: int
    repeat_with: str
    commit: str | None
    jobs: tuple[SweepJob, ...]
    later_commits: tuple[str, ...] = field(default=())

    def write(self, folder: str | os.PathLike) -> None:
        """Writes `sweep.json`, completely or not at all. A file that says the same is left alone."""
        if read_sweep(folder) != self:
            write_json(Path(folder, SWEEP), values=self._plain())

    def statuses(self, folder: str | os.PathLike) -> dict[str, Status]:
        """Folder name -> state of every job."""
        return {job.folder: read_status(Path(folder, job.folder)) for job in self.jobs}

    def _plain(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        jobs = [{name: getattr(job, name) for name in job.__dataclass_fields__} for job in self.jobs]
        return values | {"grid": {key: list(entries) for key, entries in self.grid.items()}, "jobs": jobs}


def read_sweep(folder: str | os.PathLike) -> SweepRecord | None:
    """What `sweep.json` of the folder says; None if there is none. Raises RecordError if it is cut, or of another program."""
    path = Path(folder, SWEEP)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except json.JSONDecodeError:
        values = None
    if not isinstance(values, dict) or not {"jobs", "grid", "words"} <= values.keys():
        raise RecordError(
            f"{path}: is not the record of a sweep of ztk; take it out of the folder, or name another folder"
        )
    jobs = tuple(SweepJob(**{key: _tuple(value) for key, value in job.items()}) for job in values["jobs"])
    grid = values["grid"]
    return SweepRecord(**{key: _tuple(value) for key, value in values.items()} | {"jobs": jobs, "grid": grid})


class SweepBusy(ValueError):
    """Another process runs the sweep of this folder."""


@contextmanager
def lock_sweep(folder: str | os.PathLike) -> Iterator[None]:
    """One command per sweep: an advisory lock on the folder itself. It leaves no file, and the system releases it with the process.

    Raises:
        SweepBusy: another process holds it.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SweepBusy(f"{folder}: another command runs this sweep; wait for its end, or end it") from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            warnings.warn(f"{folder}: no file locks here; see that one command alone runs this sweep", stacklevel=3)
        yield
    finally:
        os.close(opened)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
