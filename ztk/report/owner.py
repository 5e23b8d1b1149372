"""The owner of a run folder: one command writes into it at a time.

The lock is POSIX's, because it ends with its process, a fork does not inherit it, and NFS keeps it between machines. Where a file system has
none, and on file systems that keep locks inside one machine, the heartbeat of the other run decides.
"""

import contextlib
import errno
import fcntl
import json
import os
import platform
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from ztk.report.heartbeat import HEARTBEAT, STALE_SECONDS, Heartbeat, is_alive, read_heartbeat

LOCK = "run.lock"
_WATCH_SECONDS = (
    15.0  # a heartbeat of another machine that does not change for so long is old, whatever the clocks show
)
_UNSUPPORTED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}


class FolderBusy(ValueError):
    """Another process writes into the folder. The message names it and the fix."""


class RunOwner:
    """Holds the lock of a run folder from the first write on, and writes its heartbeat from `begin` on.

    The lock file and the heartbeat are removed by `end`. A killed owner leaves both without effect.

    token: differs for every owner. A rank that finds it in the folder sees the folder of this run.

    Raises:
        FolderBusy: another process of this machine holds the lock, or the heartbeat of another machine's process is alive.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike, *, say: Callable[[str], None] = lambda text: None) -> None:
        """say: prints a line before a wait of several seconds."""
        self.token = secrets.token_hex(8)
        self._folder, self._path, self._say = Path(folder), Path(folder, LOCK), say
        self._fd: int | None = None
        self._beat: Heartbeat | None = None

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._fd = _locked(self._path)
            self._check_heartbeat()
            own = {"host": platform.node(), "pid": os.getpid(), "started": time.time(), "token": self.token}
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(own).encode(), 0)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def begin(self) -> None:
        """Starts the heartbeat: from now on the folder has a running run."""
        self._beat = Heartbeat(self._folder)
        self._beat.__enter__()

    def end(self) -> None:
        """Removes the heartbeat and releases the lock. Idempotent."""
        if self._beat is not None:
            self._beat.end()
            self._beat = None
        if self._fd is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()  # before the release: afterwards it may be another owner's
            os.close(self._fd)
            self._fd = None

    def _check_heartbeat(self) -> None:
        """Decides by the heartbeat where the lock may not: on another machine, or without locks."""
        beat = _beat_of(self._folder)
        if beat is None or (beat["host"] == platform.node() and beat["pid"] == os.getpid()):
            return
        if beat["host"] == platform.node():
            if is_alive(beat):
                raise FolderBusy(busy(self._folder, holder=beat))
            return
        # Neither the clocks of two machines nor their views of a shared folder are equal, so the file must stay as it is for some time.
        seconds = min(STALE_SECONDS, max(_WATCH_SECONDS, STALE_SECONDS - (time.time() - beat["time"])))
        self._say(
            f"{self._folder}: a run on {beat['host']} has left its heartbeat; waiting {seconds:.0f} s for a change"
        )
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(0.5, seconds))
            now = _beat_of(self._folder)
            if now is None:
                return
            if now != beat:
                raise FolderBusy(busy(self._folder, holder=now))


def token_of(folder: str | os.PathLike) -> str | None:
    """Returns the token of the folder's owner as this machine finds it, or None."""
    return _holder(Path(folder, LOCK)).get("token")


def busy(folder: Path, *, holder: dict[str, Any]) -> str:
    """Returns the message about a folder that another process uses. holder: host, pid and start, as far as they are known."""
    if "pid" not in holder:
        return f"{folder}: another run writes into this folder; wait for its end, or name another folder"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["started"]))
    here = holder["host"] == platform.node()
    ended = "" if here else f"; if that run has ended, remove {folder / HEARTBEAT} and start again"
    return (
        f"{folder}: process {holder['pid']} on {holder['host']} writes into this folder since {since}; wait for its end, end it "
        f"(kill {holder['pid']}), or name another folder{ended}"
    )


def _locked(path: Path) -> int:
    """Opens and locks the file. A previous owner may remove it meanwhile, so the locked file must still be the one of that name."""
    while True:
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX allows both
            os.close(opened)
            raise FolderBusy(busy(path.parent, holder=_holder(path))) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                os.close(opened)
                raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(opened), os.stat(path)):
                return opened
        os.close(opened)


def _holder(path: Path) -> dict[str, Any]:
    """Returns the content of a lock file, empty while its owner writes it. Never call it in the owner: closing any descriptor of the file
    ends a POSIX lock.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _beat_of(folder: Path) -> dict[str, Any] | None:
    try:
        return read_heartbeat(folder)
    except ValueError:
        return None  # cut by a kill
