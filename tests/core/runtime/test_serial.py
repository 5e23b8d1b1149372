"""A background thread: it frees memory before it returns a result, and raises after its end."""

import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from ztk.core.runtime.serial import SerialThread


class Held:
    """Stands for a tensor."""


def test_a_call_is_freed_before_its_result_is_there():
    """The receiver of the result may end the process, and freeing tensors meanwhile would abort it."""
    thread, held = SerialThread(name="test"), Held()
    alive = weakref.ref(held)
    future = thread.submit(lambda held=held: held is None)
    seen = []
    future.add_done_callback(lambda _: seen.append(alive()))
    del held
    assert future.result() is False
    thread.close()
    assert seen == [None]


def test_several_ends_end_the_thread():
    """The finalizer's, `close` and the end of the process may all come before the thread looks: it spun for the 60 s of a join."""
    thread, go = SerialThread(name="test"), threading.Event()
    done = thread.submit(go.wait)
    for _ in range(3):
        thread._calls.queue.put(None)
    last = thread.submit(lambda: "ran")
    go.set()
    thread._thread.join(20)
    assert not thread._thread.is_alive() and done.result() and last.result() == "ran"
    assert thread.submit(lambda: "here").result() == "here"


def test_calls_after_the_end_run_at_once():
    thread = SerialThread(name="test")
    order = []
    thread.submit(lambda: order.append(1))
    thread.close()
    thread.submit(lambda: order.append(2)).result(timeout=5)
    with pytest.raises(KeyError):
        thread.submit(lambda: {}["missing"]).result(timeout=5)
    assert order == [1, 2]


SCRIPT = """
import sys, threading, time
from ztk.core.runtime.serial import SerialThread
thread, stop = SerialThread(name="slow"), threading.Event()
waiting = SerialThread(name="waits for a peer", interrupt=stop.set)
thread.submit(lambda: (time.sleep(0.5), print("ended", flush=True)))
waiting.submit(lambda: (stop.wait(60), print("interrupted", flush=True)))
import atexit
atexit.register(lambda: print("before exit", [t.name for t in threading.enumerate() if t.daemon], flush=True))
"""


def test_threads_end_before_the_interpreter():
    """The one that works is waited for, the one that waits for another rank is interrupted."""
    run = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(run, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True, timeout=60)
    *ended, last = done.stdout.splitlines()
    assert sorted(ended) == ["ended", "interrupted"] and last == "before exit []"
