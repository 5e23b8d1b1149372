"""Detects ranks that wait in different collectives, for transports that cannot: gloo between machines, NCCL.

Every rank numbers its collectives and periodically writes a few of them to a store: the last ones, and those up to the one it waits for.
These are about 2 KB per rank, so rank 0's store holds 2 MB of 1,024 ranks. A rank that waits long in a collective reads which collectives the
others entered under the same number. If a label differs, both ranks raise an error. A rank that is late is reported once, because it may only
be slow. On a GPU the host may be in a call that cannot be interrupted, so the process exits a few seconds after the error is found, unless
the program has exited by itself.
"""

import functools
import hashlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from ztk.core.runtime.comm.errors import CommMismatch
from ztk.core.runtime.ending import end_with_process, forget, join_busy

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 10.0
_REMEMBERED = 4096  # collectives: a GPU's host may run this far ahead of the device
_PUBLISHED = 8  # collectives before the oldest open one, and at the end: a source of a broadcast leaves it before the others enter it


@dataclass(kw_only=True, slots=True)
class Entered:
    """A collective that this rank has started. since: start time, of `time.monotonic`."""

    number: int
    label: str
    since: float
    is_over: Callable[[], bool] | None = None  # set for non-blocking transports once the collective was issued


class Watchdog:
    """The watchdog of one communicator. `mismatch` is the error, once it is found."""

    def __init__(
        self, store: dist.Store, *, name: str, rank: int, size: int, patience: float, ends_process: bool
    ) -> None:
        """size: ranks of the communicator. patience: seconds that a collective may take before labels are compared."""
        self.mismatch: CommMismatch | None = None
        self._store, self._name, self._rank, self._size, self._patience = store, name, rank, size, patience
        self._prefix = f"ztk/watchdog/{hashlib.sha256(name.encode()).hexdigest()[:16]}"  # a name may list all ranks
        self._ends_process = ends_process
        self._number, self._records = 0, False
        self._labels: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)
        self._open: deque[Entered] = deque()
        self._lock = threading.Lock()
        self._reported: set[tuple[int, int]] = set()  # (number, rank) already reported as late
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ztk-watchdog", daemon=True)
        end_with_process(self._thread, end=functools.partial(_end, self._thread, self._ended))
        self._thread.start()

    def enter(self, label: str) -> Entered:
        """Records the start of a collective."""
        self._records = False
        with self._lock:
            self._forget_completed()
            self._number += 1
            entered = Entered(number=self._number, label=label, since=time.monotonic())
            self._labels.append((entered.number, label))
            self._open.append(entered)
        return entered

    def leave(self, entered: Entered, *, is_over: Callable[[], bool] | None = None) -> None:
        """Marks the collective as complete, or as running on the device until `is_over()` returns True. A later call replaces `is_over`."""
        with self._lock:
            if is_over is None:
                self._open.remove(entered)
            else:
                entered.is_over = is_over

    def pass_over(self) -> None:
        """Called when a collective becomes part of a CUDA graph. No event is queried until the next `enter`: a query would end the
        capture."""
        self._records = True

    def close(self) -> None:
        """Stops the thread. Idempotent."""
        self._ended.set()

    def _watch(self) -> None:
        try:
            self._look()
        finally:
            forget(threading.current_thread())

    def _look(self) -> None:
        published: list[tuple[int, str]] = []
        while not self._ended.wait(self._patience / 4):
            with self._lock:
                self._forget_completed()
                oldest = self._open[0] if self._open else None
                labels = self._around(oldest)
            try:
                if labels != published:
                    self._store.set(self._key(self._rank), json.dumps(labels))
                    published = labels
                if oldest is not None and self.mismatch is None and time.monotonic() - oldest.since > self._patience:
                    self._compare(oldest)
            except RuntimeError:  # the rank that served the store is gone; its end is the cause to show
                return

    def _around(self, oldest: Entered | None) -> list[tuple[int, str]]:
        """The last collectives, and those from shortly before the oldest open one on to it. The caller holds the lock."""
        labels = list(self._labels)
        if oldest is None or not labels:
            return labels[-_PUBLISHED:]
        place = oldest.number - labels[0][0]
        near = labels[max(0, place - _PUBLISHED) : max(0, place + 1)]
        return near + [each for each in labels[-_PUBLISHED:] if each[0] > oldest.number]

    def _forget_completed(self) -> None:
        """The caller holds the lock."""
        while not self._records and self._open and (is_over := self._open[0].is_over) is not None and is_over():
            self._open.popleft()

    def _compare(self, own: Entered) -> None:
        late = []
        for rank in range(self._size):
            if rank == self._rank or not self._store.check([self._key(rank)]):
                continue
            theirs = dict(json.loads(self._store.get(self._key(rank))))
            if own.number in theirs and theirs[own.number] != own.label:
                self.mismatch = CommMismatch(
                    f"{self._name}: rank {self._rank} is at '{own.label}', rank {rank} at '{theirs[own.number]}': the ranks "
                    "ran different modules or shapes"
                )
                logger.error("%s", self.mismatch)
                if self._ends_process and not self._ended.wait(_GRACE_SECONDS):
                    os._exit(1)
                return
            last = max(theirs, default=0)
            if last < own.number and (own.number, rank) not in self._reported:
                self._reported.add((own.number, rank))
                late.append(f"rank {rank} has not arrived yet and was last at '{theirs.get(last, 'nothing')}'")
        if late:
            waited = time.monotonic() - own.since
            text = "%s: rank %d has waited %.0f s at '%s'; %s"
            logger.warning(text, self._name, self._rank, waited, own.label, "; ".join(late))

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"


def _end(thread: threading.Thread, ended: threading.Event) -> None:
    ended.set()
    join_busy(thread)
