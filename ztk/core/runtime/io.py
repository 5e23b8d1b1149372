"""Disk traffic of one process, counted at the system calls."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum


class Direction(StrEnum):
    """Direction of a transfer."""

    read = "read"  # disk to memory
    write = "write"  # memory to disk


@dataclass(kw_only=True)
class IoCounters:
    """Bytes and busy seconds of file reads and writes; several threads and stores may share one.

    `*_bytes` counts the disk traffic (full 4096-byte pages), `*_payload_bytes` the requested part of it.
    Seconds are wall time during which at least one such transfer was running: two overlapping reads count once, so
    bytes / seconds is the rate of the disk. `busy_seconds` is the same over reads and writes together. Seconds of a
    transfer are added when the last of the overlapping ones ends.
    """

    read_bytes: int = 0
    write_bytes: int = 0
    read_payload_bytes: int = 0
    write_payload_bytes: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    busy_seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)
    _reading: "_Busy" = field(default_factory=lambda: _Busy(), init=False, repr=False, compare=False)
    _writing: "_Busy" = field(default_factory=lambda: _Busy(), init=False, repr=False, compare=False)
    _moving: "_Busy" = field(default_factory=lambda: _Busy(), init=False, repr=False, compare=False)

    @contextmanager
    def moving(self, direction: Direction, *, nbytes: int, payload_bytes: int) -> Iterator[None]:
        """Count one transfer around the block that does it; a transfer that raises adds time but no bytes."""
        one_way = self._reading if direction is Direction.read else self._writing
        with self._lock:
            now = time.perf_counter()
            one_way.begin(now)
            self._moving.begin(now)
        moved = False
        try:
            yield
            moved = True
        finally:
            with self._lock:
                now = time.perf_counter()
                seconds = one_way.end(now)
                self.busy_seconds += self._moving.end(now)
                if direction is Direction.read:
                    self.read_seconds += seconds
                    self.read_bytes += nbytes * moved
                    self.read_payload_bytes += payload_bytes * moved
                else:
                    self.write_seconds += seconds
                    self.write_bytes += nbytes * moved
                    self.write_payload_bytes += payload_bytes * moved


@dataclass(slots=True)
class _Busy:
    """The union of overlapping intervals: opened by the first to begin, closed by the last to end."""

    running: int = 0
    since: float = 0.0

    def begin(self, now: float) -> None:
        if self.running == 0:
            self.since = now
        self.running += 1

    def end(self, now: float) -> float:
        """Seconds of the interval that closes now, 0 while others are still running."""
        self.running -= 1
        return now - self.since if self.running == 0 else 0.0
