"""`sweep.json`: the jobs of a sweep and their folders, written before the first one starts."""

import errno
import fcntl
import json
import os
import re
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


def as_written(word: str) -> str:
    """Returns an override of Hydra as on the command line: "augment=strong" of "augment@user.augment=strong"."""
    return re.sub(r"^([\w-]+)@user\.\1=", r"\1=", word)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepJob:
    """One run of a sweep.

    folder: its name below the sweep's folder: `hash`, or `hash-1`, `hash-2`, ... for repeats. overrides: words of the command line. options:
    added for this repeat, such as `train.seed=1`.
    """

    folder: str
    hash: str
    overrides: tuple[str, ...]
    repeat: int = 0
    options: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The overrides and options as on the command line."""
        return tuple(map(as_written, (*self.overrides, *self.options)))


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRecord:
    """A sweep as requested.

    command: the command line as one text. flags, words: its parts, without `sweep.*` and the folder. grid: key -> its values.
    commit: commit of the checkout that started it. later_commits: commits of the checkouts that continued it.
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
        """Writes `sweep.json` atomically, unless its content is the same."""
        if read_sweep(folder) != self:
            write_json(Path(folder, SWEEP), values=self._plain())

    def statuses(self, folder: str | os.PathLike) -> dict[str, Status]:
        """Returns folder name -> state of every job."""
        return {job.folder: read_status(Path(folder, job.folder)) for job in self.jobs}

    def _plain(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        jobs = [{name: getattr(job, name) for name in job.__dataclass_fields__} for job in self.jobs]
        return values | {"grid": {key: list(entries) for key, entries in self.grid.items()}, "jobs": jobs}


def read_sweep(folder: str | os.PathLike) -> SweepRecord | None:
    """Reads `sweep.json` of the folder. Returns None if there is none.

    Raises RecordError if it is truncated, belongs to another program, or names a job's folder outside of its own.
    """
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
    if outside := [job.folder for job in jobs if not re.fullmatch(r"[\w-]+", job.folder)]:
        raise RecordError(
            f"{path}: has a job in {outside[0]!r}, which is no name of a folder; take the record out of the folder"
        )
    grid = values["grid"]
    return SweepRecord(**{key: _tuple(value) for key, value in values.items()} | {"jobs": jobs, "grid": grid})


class SweepBusy(ValueError):
    """Another process runs the sweep of this folder."""


@contextmanager
def lock_sweep(folder: str | os.PathLike) -> Iterator[None]:
    """Ensures one command per sweep with an advisory lock on the folder itself.

    It leaves no file, and the system releases it with the process.

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
