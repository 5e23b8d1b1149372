"""The status of a run, read from its folder."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from ztk.report import commit
from ztk.report.folder import write_failed_summary
from ztk.report.heartbeat import Heartbeat, is_alive, read_heartbeat
from ztk.report.status import Status, read_status

BEATS = """
import sys, time
from ztk.report.heartbeat import Heartbeat
with Heartbeat(sys.argv[1]):
    print("beats", flush=True)
    time.sleep(60)
"""


def test_a_killed_process_is_dead_and_a_living_one_runs(tmp_path):
    assert read_status(tmp_path) is Status.pending
    (tmp_path / "summary.json").write_text(json.dumps({"status": "failed"}))  # of an earlier start
    os.utime(tmp_path / "summary.json", (1, 1))
    with subprocess.Popen([sys.executable, "-c", BEATS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        assert read_status(tmp_path) is Status.running
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert read_status(tmp_path) is Status.dead
    (tmp_path / "summary.json").write_text(json.dumps({"status": "done"}))  # written after that start
    assert read_status(tmp_path) is Status.done


@pytest.mark.parametrize("status", ["failed", "refused"])
def test_an_ended_run_has_the_state_of_its_summary(status, tmp_path):
    with Heartbeat(tmp_path):
        write_failed_summary(tmp_path, error="why", status=status)
        assert read_status(tmp_path) is Status.running
    assert read_heartbeat(tmp_path) is None
    assert read_status(tmp_path) is Status(status)


def test_a_folder_with_rows_alone_is_of_a_dead_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0}\n')
    assert read_status(tmp_path) is Status.dead


def test_a_process_of_the_same_number_is_not_the_run(tmp_path):
    with Heartbeat(tmp_path):
        beat = read_heartbeat(tmp_path)
    assert is_alive(beat)
    assert not is_alive(beat | {"process_start": "1"})


def test_a_run_elsewhere_is_judged_by_the_age_of_its_heartbeat():
    beat = {"host": "elsewhere", "pid": 1, "process_start": "1"}
    assert is_alive(beat | {"time": time.time()})
    assert not is_alive(beat | {"time": time.time() - 100})


def test_a_package_below_another_repository_has_no_commit(tmp_path, monkeypatch):
    """As in the .venv of a user's repository: the commit would be the user's."""

    def git(*words):
        names = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *names, *words], cwd=tmp_path, check=True, capture_output=True)

    copy = tmp_path / "lib" / "commit.py"
    copy.parent.mkdir()
    copy.write_text("")
    (tmp_path / "own.py").write_text("")
    git("init")
    git("add", "own.py")
    git("commit", "-m", "own")
    monkeypatch.setattr(commit, "__file__", str(copy))
    assert commit.read_commit() is None
    git("add", "lib")
    git("commit", "-m", "lib")
    assert re.fullmatch("[0-9a-f]{40}", commit.read_commit())
