"""The lock of a run folder: one owner, whatever an earlier one has left."""

import fcntl
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from ztk.report import owner as owner_module
from ztk.report.heartbeat import process_start
from ztk.report.owner import FolderBusy, RunOwner, token_of

ELSEWHERE = {"pid": 7, "process_start": "1", "host": "elsewhere", "started": 1.0}
HOLDER = """
import sys
from ztk.report.owner import RunOwner
with RunOwner(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    words = [sys.executable, "-c", HOLDER, str(tmp_path)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_lock_of_a_living_process_is_refused_and_that_of_a_killed_one_is_taken(holder, tmp_path):
    with pytest.raises(
        FolderBusy, match=rf"process {holder.pid} on {os.uname().nodename} writes into this folder since"
    ):
        RunOwner(tmp_path).__enter__()
    holder.kill()
    holder.wait()
    assert (tmp_path / "run.lock").exists()
    with RunOwner(tmp_path) as owner:
        code = "import sys; from ztk.report.owner import token_of; print(token_of(sys.argv[1]))"
        found = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == owner.token  # another process; one's own would release the lock
    assert not (tmp_path / "run.lock").exists() and token_of(tmp_path) is None


def test_a_lock_file_that_its_owner_removes_meanwhile_is_not_taken(tmp_path, monkeypatch):
    """A lock on the removed file would let a third process lock a new one."""
    whole, path = fcntl.lockf, tmp_path / "run.lock"

    def lockf(fd, flags):
        whole(fd, flags)
        if not path.with_name("done").exists():
            path.with_name("done").touch()
            path.unlink()

    monkeypatch.setattr(owner_module.fcntl, "lockf", lockf)
    with RunOwner(tmp_path) as owner:
        assert owner._fd is not None and os.path.samestat(os.fstat(owner._fd), os.stat(path))


def beat(folder, **values) -> None:
    (folder / "beat").write_text(json.dumps(ELSEWHERE | {"time": time.time()} | values))
    os.replace(folder / "beat", folder / "heartbeat.json")


def test_a_heartbeat_of_another_machine_counts_while_it_changes(tmp_path, monkeypatch):
    """Whatever that machine's clock shows."""
    monkeypatch.setattr(owner_module, "STALE_SECONDS", 2.0)
    monkeypatch.setattr(owner_module, "_WATCH_SECONDS", 2.0)
    over, said = threading.Event(), []
    beat(tmp_path, time=0.0)

    def go_on() -> None:
        for number in range(1, 1000):
            if over.wait(0.1):
                return
            beat(tmp_path, time=float(number))

    thread = threading.Thread(target=go_on)
    thread.start()
    with pytest.raises(
        FolderBusy, match=rf"process 7 on elsewhere .* remove {tmp_path}/heartbeat.json and start again"
    ):
        RunOwner(tmp_path, say=said.append).__enter__()
    over.set()
    thread.join()
    assert "a run on elsewhere has left its heartbeat" in said[0] and not (tmp_path / "run.lock").exists()
    with RunOwner(tmp_path):  # it does not change any more
        pass


def test_without_locks_the_heartbeat_decides(tmp_path, monkeypatch):
    def none(fd, flags):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(owner_module.fcntl, "lockf", none)
    parent = os.getppid()
    beat(tmp_path, host=os.uname().nodename, pid=parent, process_start=process_start(parent))
    with pytest.raises(FolderBusy, match=f"process {parent} on"):
        RunOwner(tmp_path).__enter__()
    beat(tmp_path, host=os.uname().nodename, pid=parent, process_start="another process of this number")
    with RunOwner(tmp_path):
        pass
