"""A run's heartbeat: `heartbeat.json` in its folder, from its start to its end."""

import json
import os
import platform
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ztk.report.folder import write_json

HEARTBEAT = "heartbeat.json"
BEAT_SECONDS = 5.0
STALE_SECONDS = 60.0  # for a reader on another machine, whose clock may differ


class Heartbeat:
    """A context around a run that writes the file immediately and every 5 seconds, and removes it when the run ends.

    After `kill -9` the file remains and its process does not exist, so a dead run can be distinguished from a running one.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        self._path = Path(folder, HEARTBEAT)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._started = time.time()

    def __enter__(self) -> "Heartbeat":
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def end(self) -> None:
        """Removes the file. Idempotent."""
        self._over.set()
        self._thread.join()
        with suppress(OSError):
            self._path.unlink()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            with suppress(OSError):  # a full disk ends no run
                self._write()

    def _write(self) -> None:
        own = {"pid": os.getpid(), "process_start": process_start(os.getpid()), "host": platform.node()}
        write_json(self._path, values=own | {"started": self._started, "time": time.time()})


def read_heartbeat(folder: str | os.PathLike) -> dict[str, Any] | None:
    """Returns the last heartbeat, or None if the run has ended or never began."""
    try:
        return json.loads(Path(folder, HEARTBEAT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def is_alive(beat: dict[str, Any]) -> bool:
    """Returns whether the process of a heartbeat runs. On another machine, this is judged by the file's age."""
    if beat["host"] == platform.node():
        start = process_start(beat["pid"])
        return start is not None and start == beat["process_start"]
    return time.time() - beat["time"] < STALE_SECONDS


def process_start(pid: int) -> str | None:
    """Returns the system's start time of a process, or None if there is none. It distinguishes processes with the same number."""
    try:
        text = Path("/proc", str(pid), "stat").read_text()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _without_proc(pid)
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def _without_proc(pid: int) -> str | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    return "unknown"
