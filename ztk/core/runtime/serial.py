"""One background thread that runs calls in order."""

import functools
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

from ztk.core.runtime.ending import end_with_process, forget, join_busy

LONGEST_CALL_SECONDS = 60.0  # longest wait at exit for a call that depends on no other rank


class SerialThread:
    """Like an executor with one worker, but the thread is a daemon.

    A rank that fails must be able to exit while this thread waits for a peer; `concurrent.futures` joins its threads at exit. When this
    object is garbage-collected, the thread finishes the submitted calls and ends, at the latest before the interpreter does
    (`ztk.core.runtime.ending`). Later calls run at once, in the caller's thread.
    """

    def __init__(self, *, name: str, interrupt: Callable[[], None] | None = None) -> None:
        """interrupt: makes a call that waits for another rank raise, when the process ends. Must not reference this object."""
        self._calls = _Calls()
        self._thread = threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True)
        end_with_process(self._thread, end=functools.partial(_end, self._thread, self._calls, interrupt))
        self._thread.start()
        # pyrefly: ignore[missing-attribute]  # a property, which typeshed leaves out of __slots__
        weakref.finalize(self, self._calls.queue.put, None).atexit = False

    def submit(self, call: Callable) -> Future:
        """Runs `call()` after all calls submitted before it."""
        future: Future = Future()
        with self._calls.lock:
            ended = self._calls.ended
            if not ended:
                self._calls.queue.put((call, future))
        if ended:
            _run([call], future)
        return future

    def close(self) -> None:
        """Returns when everything submitted has run."""
        self._calls.queue.put(None)
        self._thread.join()


class InlineCalls:
    """The interface of `SerialThread` without a thread: a call runs where it is submitted. For plans, whose work takes no time."""

    def submit(self, call: Callable) -> Future:
        """Runs `call()`."""
        future: Future = Future()
        _run([call], future)
        return future

    def close(self) -> None:
        """Everything submitted has run."""


class _Calls:
    """The queue of a thread. The thread ends after it has received None and the queue is empty."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.ended = False


def _serve(calls: _Calls) -> None:
    is_ending = False
    while True:
        with calls.lock:
            calls.ended = is_ending and calls.queue.empty()
        if calls.ended:
            break
        item = calls.queue.get()
        if item is None:  # sent by the finalizer, by `close` and at process exit
            is_ending = True
            continue
        call, future = [item[0]], item[1]
        del item
        _run(call, future)
        del call, future  # an idle thread keeps nothing alive
    forget(threading.current_thread())


def _run(call: list[Callable], future: Future) -> None:
    """Runs the call in the list. Frees it and its tensors before the future is set, because the waiting thread may then end the process."""
    try:
        result = call[0]()
    except BaseException as error:  # raised in the thread that waits for the result
        call.clear()
        future.set_exception(error)
    else:
        call.clear()
        future.set_result(result)


def _end(thread: threading.Thread, calls: _Calls, interrupt: Callable[[], None] | None) -> None:
    calls.queue.put(None)
    if interrupt is None:
        thread.join(LONGEST_CALL_SECONDS)
        return
    join_busy(thread)
    if thread.is_alive():
        interrupt()
        join_busy(thread)
