"""Threads for updates in main memory. Each takes a part of the elements and runs all operations of the update on it.

[Note: No team of threads]
torch divides every operation on a CPU between a team of OpenMP threads, which wait for each other at its end. An AdamW step of 1B elements
has four such operations for each `UPDATE_PIECE`, 8,200 waits in all, and only one core works while Python starts the next operation. A
worker has a team of one, so its operations start no other thread and wait for none. It takes the next part when it has finished one, and
the caller waits once. An element's bits do not depend on the part that it is in. The caller waits up to 0.4 ms for the threads to wake, so
small updates stay with torch's teams. On two idle cores, teams took 0.6 to 1.2 times the time of workers at 2^20 elements, and workers
took the same time as teams from `FROM` elements on.
"""

import os
import queue
import threading
from collections.abc import Callable, Iterator

import torch

from ztk.kernels.shared.cpu import GRAIN, UPDATE_PIECE

FROM = 1 << 23  # elements of an update that workers compute
KEPT_CORES = 2  # of a rank with a GPU: one for the thread that starts kernels, one for autograd's
_UNIT = 4096  # elements: a part begins at a multiple, so it has whole vectors and whole groups of elements


def in_parts(numel: int, update: Callable[[slice], None], *, longest: int = UPDATE_PIECE) -> None:
    """Calls `update` with cuts that are [0, numel) together, and returns when all calls have ended.

    update: runs in several threads at the same time, without autograd; in the caller's thread if it has one core or fewer than `FROM`
    elements. longest: elements of a cut at most, a multiple of 4,096. Raises the first error of a call, after which no other begins.
    """
    threads = torch.get_num_threads()
    if threads == 1 or numel < FROM:
        for cut in _cuts(numel, size=longest):
            update(cut)
        return
    count = max(1, threads - KEPT_CORES) if torch.cuda.is_initialized() else threads
    count = min(count, -(-numel // GRAIN))
    rounds = -(-numel // (longest * count))  # parts of equal size, and as many for every worker
    size = min(longest, -(-numel // (rounds * count * _UNIT)) * _UNIT)
    _team.run(_Call(update, cuts=_cuts(numel, size=size), workers=count), workers=count)


def _cuts(numel: int, *, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, numel)) for start in range(0, numel, size))


class _Call:
    """The parts of one update. ended: set when all workers have left it. error: the first of a part."""

    def __init__(self, update: Callable[[slice], None], *, cuts: Iterator[slice], workers: int) -> None:
        self._update, self._cuts, self._workers, self._lock = update, cuts, workers, threading.Lock()
        self._is_inference = torch.is_inference_mode_enabled()
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Updates parts until none is left."""
        try:
            with torch.inference_mode(self._is_inference), torch.no_grad():
                while (cut := self._next()) is not None:
                    self._update(cut)
        except BaseException as error:
            self.error = self.error or error
            self.stop()
        with self._lock:
            self._workers -= 1
            if self._workers == 0:
                self.ended.set()

    def stop(self) -> None:
        """Drops all parts that have not begun."""
        with self._lock:
            self._cuts = iter(())

    def _next(self) -> slice | None:
        with self._lock:
            return next(self._cuts, None)


class _Team:
    """Daemon threads that wait for calls until the process ends."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._lock, self._size = threading.Lock(), 0

    def run(self, call: _Call, *, workers: int) -> None:
        """Returns when so many workers have left the call. Raises its error."""
        with self._lock:
            self._grow(workers)
        for _ in range(workers):
            self._calls.put(call)
        try:
            call.ended.wait()
        except BaseException:  # a signal: nothing writes any more when it is handled
            call.stop()
            call.ended.wait()
            raise
        if call.error is not None:
            raise call.error

    def _grow(self, workers: int) -> None:
        threads, started = torch.get_num_threads(), threading.Semaphore(0)
        for _ in range(self._size, workers):
            threading.Thread(target=_serve, args=(self._calls, started), name="ztk-part", daemon=True).start()
            started.acquire()
            torch.set_num_threads(threads)  # a worker's setting is also the default of threads that torch meets later
        self._size = max(self._size, workers)

    def forget(self) -> None:
        """A forked child has none of the threads."""
        self.__init__()


def _serve(calls: "queue.SimpleQueue[_Call]", started: threading.Semaphore) -> None:
    torch.get_num_threads()  # torch gives a thread its default at the first question or operation
    torch.set_num_threads(1)
    started.release()
    while True:
        calls.get().run()


_team = _Team()
os.register_at_fork(after_in_child=_team.forget)
