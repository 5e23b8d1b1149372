"""One background thread that runs calls in order."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future


class SerialThread:
    """Like an executor with one worker, but the thread is a daemon.

    A rank that fails must be able to exit while this thread waits for a peer; `concurrent.futures` joins its threads at exit. When
    this object is no longer referenced, the thread ends after the submitted calls.
    """

    def __init__(self, *, name: str) -> None:
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._calls.put, None).atexit = False

    def submit(self, call: Callable) -> Future:
        """Runs `call()` after all calls submitted before it."""
        future: Future = Future()
        self._calls.put((call, future))
        return future

    def close(self) -> None:
        """Returns when everything submitted has run."""
        self._calls.put(None)
        self._thread.join()


def _serve(calls: queue.SimpleQueue) -> None:
    while (item := calls.get()) is not None:
        call, future = item
        try:
            future.set_result(call())
        except BaseException as error:  # the caller of `result()` gets it
            future.set_exception(error)
        del item, call, future
