"""Ranks that are forks of one interpreter fail and end as processes do; `test_calls` compares their bits."""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_calls import waited
from ztk.core.launch import Child, Forker, python_path, run_children
from ztk.core.launch.processes import before_start
from ztk.report.heartbeat import process_start


@pytest.fixture
def forker():
    environment = {**os.environ, "PYTHONPATH": python_path()}
    made = Forker(threads=1, environment=environment)
    yield made
    made.close()


def child(rank: int, *, folder: Path, config: str = "absent.yaml") -> Child:
    environment = {**os.environ, "RANK": str(rank), "OWN": f"of {rank}"}
    return Child(
        rank=rank, command=["python", "-m", "ztk.worker", config], environment=environment, log=folder / f"{rank}.log"
    )


def test_forks_fail_and_end_as_processes_do(forker, tmp_path):
    for rank in (0, 1):  # one after the other: the first that fails ends the others
        [failure] = run_children([child(rank, folder=tmp_path)], start=forker.start)
        assert failure.code == 1
        assert "FileNotFoundError" in (tmp_path / f"{rank}.log").read_text()

    os.mkfifo(tmp_path / "waits.yaml")  # a pipe without a writer: opening it for reading blocks for ever
    waiting = [child(rank, folder=tmp_path, config=str(tmp_path / "waits.yaml")) for rank in (0, 1)]
    killed, left = (forker.start(one, log=open(tmp_path / f"{one.rank}.log")) for one in waiting)
    assert os.getpgid(killed.pid) == killed.pid  # a signal to its group reaches no other rank
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL and left.poll() is None
    forker.close()
    assert left.wait() == -signal.SIGKILL
    assert waited(lambda: process_start(left.pid) is None)


def test_what_runs_in_a_fork_looks_nothing_up(monkeypatch):
    """See [Note: Forking with threads]: a lazy import in the fork could wait for a lock that no thread there releases."""
    looked_up = []

    class Library:
        def __getattr__(self, name):
            looked_up.append(name)
            return lambda *arguments: 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    monkeypatch.setattr(os, "setpgrp", lambda: None)
    prepare = before_start(cores=None, parent=os.getppid())
    before = list(looked_up)
    prepare()
    assert looked_up == before


ORPHAN = """
import os, sys
from ztk.cli.rank_server import _become
server = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == server:
    pass
_become({"cores": None, "environment": {}, "log": None, "arguments": []}, server=server)
print("goes on")
"""


def test_a_rank_whose_interpreter_ended_before_it_began_ends():
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN], env=environment, stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert not done.stdout  # which the orphan has closed: it has ended
