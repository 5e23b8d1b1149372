"""Streams, records and error files that fail: nothing that a run prints or records ends it, and its error keeps its cause."""

import errno
import io
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ztk.core.launch import errors
from ztk.core.launch.errors import failure_of, read_failure, write_failure
from ztk.core.launch.output import LastingOutput
from ztk.core.launch.processes import _signals
from ztk.report.folder import LineFile

CHECKOUT = Path(__file__).parents[3]
LINE = ("--config-dir", str(CHECKOUT / "tests" / "tasks"), "task=fake", "launch.ranks=2", "train.steps=3")


def closed() -> None:
    os.close(1)
    os.close(2)


def hung_up() -> int:
    """A terminal whose other end is closed: writing to it fails with EIO."""
    ours, theirs = pty.openpty()
    os.close(ours)
    return theirs


@pytest.mark.parametrize("how", ["closed", "full", "gone"])
def test_output_that_fails_ends_no_run(how, tmp_path):
    stream = {"closed": lambda: None, "full": lambda: os.open("/dev/full", os.O_WRONLY), "gone": hung_up}[how]()
    words = [sys.executable, str(CHECKOUT / "run.py"), *LINE, "hydra.run.dir=run"]
    place = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    prepare = closed if how == "closed" else None
    done = subprocess.run(
        words, cwd=tmp_path, env=place, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, preexec_fn=prepare
    )
    if stream is not None:
        os.close(stream)
    assert done.returncode == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3
    log = (tmp_path / "run" / "ranks" / "rank0.log").read_text()
    assert "rank 0 of 2" in log and ("standard output was closed" in log) == (how != "closed")
    assert (tmp_path / "run" / "ranks" / "rank1.log").read_text().startswith("rank 1 of 2")


class Failing(io.StringIO):
    """Fails with `number` while it is set."""

    number: int | None = None

    def write(self, text: str) -> int:
        if self.number is not None:
            raise OSError(self.number, os.strerror(self.number))
        return super().write(text)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EPIPE, errno.EBADF, errno.EFBIG, errno.EAGAIN])
def test_a_stream_that_fails_raises_nothing_and_tells_once(number):
    told, stream = [], Failing()
    lasting = LastingOutput(stream, on_lost=told.append)
    lasting.write("first\n")
    stream.number = number
    assert lasting.write("lost\n") == 5 and lasting.write("lost\n") == 5
    assert told == [os.strerror(number)]
    stream.number = None
    lasting.write("again\n")
    assert stream.getvalue() == "first\nagain\n"
    stream.close()
    assert lasting.write("closed\n") == 7 and not lasting.isatty()
    lasting.flush()


def test_rows_wait_for_room_on_a_full_disk(tmp_path, monkeypatch):
    """A write that stops in the middle leaves no part of a row, and no row is lost once there is room."""
    file, whole = LineFile(tmp_path / "rows"), os.write
    file.write(["1"])

    def half(fd, data):
        if len(data) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(fd, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    file.write(["22222222"])
    assert (tmp_path / "rows").read_text() == "1\n" and "No space left on device" in (file.notice or "")
    with pytest.raises(OSError):
        file.close()
    monkeypatch.setattr(os, "write", whole)
    file.write(["3"])
    file.close()
    assert (tmp_path / "rows").read_text() == "1\n22222222\n3\n"


def test_an_error_reaches_the_launcher_without_a_file(tmp_path, monkeypatch):
    """B8: a full disk took the error file, and the launcher named only an exit code."""
    memory = tmp_path / "memory"
    memory.touch()
    monkeypatch.setenv(errors.FAILURES, str(memory))
    (tmp_path / "run").touch()  # no folder, so nothing can be written below it
    write_failure(failure_of(ValueError("the cause"), rank=1), output_dir=tmp_path / "run")
    assert read_failure(tmp_path / "other", rank=0, memory=memory) is None
    found = read_failure(tmp_path / "other", rank=1, memory=memory)
    assert found is not None and str(found) == "rank 1: ValueError: the cause"


def test_nohup_keeps_its_effect():
    """The launcher's handler replaced the ignored signal, so the end of a terminal ended the run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _signals() as received:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
        assert received == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


SHOWS = {
    "configuration": ("run.py", "model=nano", "--cfg", "job"),
    "help": ("run.py", "--help"),
    "job script": ("run.py", "model=nano", "launch=slurm", "--dry-run"),
    "list": ("run.py", "-m", "model=nano", "train.seed=0,1", "sweep.list=true"),
    "comparison": ("-m", "ztk.report", "compare", "run"),
}


@pytest.mark.parametrize("command", SHOWS)
def test_a_lost_result_is_a_failure(command, tmp_path):
    """The text is the only result of these commands. A reader that ends early, such as `head`, is no failure."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text('{"status": "done", "steps": 3, "final_loss": 1.0}')
    words = [str(CHECKOUT / word) if word == "run.py" else word for word in SHOWS[command]]
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(CHECKOUT)}, "stdin": subprocess.DEVNULL}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, *words], **options, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "standard output is not complete: No space left on device" in done.stderr, (
        done.stderr
    )
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, *words], **options, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.returncode == 0 and "not complete" not in done.stderr, done.stderr
