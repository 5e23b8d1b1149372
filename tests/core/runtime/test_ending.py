"""Threads that the end of a process waits for: gloo's, until they sleep, and a busy thread of ztk's, until it ends."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from ztk.core.runtime import ending

SCRIPT = """
import time
import torch
import torch.distributed as dist
{imports}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group, x = dist.new_group(), torch.ones(1)
dist.all_reduce(x, group=group)
del x  # the thread's is the last reference
time.sleep(0.2)
"""


def exit_code(folder: Path, *, imports: str) -> int:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not sys.platform.startswith("linux") or sys.version_info >= (3, 14):
        pytest.skip("needs a C compiler, LD_PRELOAD and a Python that ends threads that come late; 3.14 lets them hang")
    source, library = Path(__file__).with_name("late_gloo.c"), folder / "late.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    environment = os.environ | {"LD_PRELOAD": str(library)}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(imports=imports)], env=environment, stderr=subprocess.DEVNULL, check=False
    ).returncode


def test_a_collective_in_the_last_line_does_not_abort(tmp_path):
    """Without the wait Python ends gloo's thread in C++: the first of two exits is SIGABRT, or SIGSEGV where the thread comes later."""
    assert exit_code(tmp_path, imports="") < 0
    assert exit_code(tmp_path, imports="import ztk.core.runtime.ending") == 0


def test_torch_names_gloos_threads_as_ever():
    before = ending.gloo_threads()
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    deadline = time.monotonic() + 20  # a thread names itself when it first runs
    while len(ending.gloo_threads()) <= len(before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(ending.gloo_threads()) > len(before)
    del group


def test_a_busy_thread_is_joined_and_a_sleeping_one_left_alone(monkeypatch):
    """On a busy machine a thread may need more than the seconds that a thread may wait for another rank."""
    monkeypatch.setattr(ending, "seconds_to_end", lambda: 0.2)
    until, wake = time.monotonic() + 1, threading.Event()

    def compute() -> None:
        while time.monotonic() < until:
            sum(range(1000))

    busy, sleeping = threading.Thread(target=compute), threading.Thread(target=wake.wait)
    busy.start()
    sleeping.start()
    ending.join_busy(busy)
    ending.join_busy(sleeping)
    assert not busy.is_alive() and sleeping.is_alive()
    wake.set()
