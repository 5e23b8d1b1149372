"""Starting plain commands as ranks: no torch, so each test takes a second."""

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ztk.core.launch import RankError, allocator_settings, log_path, run_ranks
from ztk.core.launch.processes import before_start

CHECKOUT = Path(__file__).parents[2]
# A rank's command is `python -c PRELUDE + program`; `rank` and `fail` are at hand.
PRELUDE = """
import os, signal, sys, time
from ztk.core.launch import failure_of, write_failure
rank = int(os.environ["RANK"])
def fail(error, code=1):
    write_failure(failure_of(error, rank=rank), output_dir=sys.argv[1])
    os._exit(code)
"""


def command(program: str, *, output_dir: Path) -> list[str]:
    return [sys.executable, "-c", PRELUDE + textwrap.dedent(program), str(output_dir)]


def run(program: str, *, output_dir: Path, ranks: int = 2) -> None:
    run_ranks(command(program, output_dir=output_dir), ranks=ranks, threads=1, output_dir=output_dir)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_every_rank_has_its_place_and_its_log(tmp_path):
    run(
        """
        names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"
        print(*[os.environ[name] for name in names], os.path.isdir(os.path.dirname(os.environ["ZTK_STORE"])))
        """,
        output_dir=tmp_path,
        ranks=3,
    )
    assert log_path(tmp_path, rank=1).read_text() == "1 1 3 3 1 True\n"
    assert log_path(tmp_path, rank=2).read_text() == "2 2 3 3 1 True\n"


def test_a_failing_rank_stops_the_others_and_is_named(tmp_path):
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1: ValueError: boom"):
        run(
            """
            if rank == 1:
                fail(ValueError("boom"))
            time.sleep(60)
            """,
            output_dir=tmp_path,
        )
    assert time.monotonic() - start < 20  # the other one would wait for a minute


def test_the_first_cause_beats_the_loss_of_a_peer(tmp_path):
    with pytest.raises(RankError, match="rank 2: OSError: disk full"):
        run(
            """
            ready = os.path.join(sys.argv[1], "ready")
            if rank < 2:
                while not os.path.exists(ready):
                    time.sleep(0.01)
                fail(RuntimeError("Connection closed by peer [127.0.0.1]:1234"))
            open(ready, "w").close()
            time.sleep(0.3)
            fail(OSError("disk full"))
            """,
            output_dir=tmp_path,
            ranks=3,
        )


def test_a_killed_rank_is_named_although_its_peers_complain_first(tmp_path):
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        run(
            """
            dying = os.path.join(sys.argv[1], "dying")
            if rank == 1:
                open(dying, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            while not os.path.exists(dying):
                time.sleep(0.01)
            fail(RuntimeError("Connection closed by peer [127.0.0.1]:1234"))
            """,
            output_dir=tmp_path,
        )


def test_a_silent_exit_is_named(tmp_path):
    with pytest.raises(RankError, match="rank 0 ended with exit code 7"):
        run("os._exit(7 if rank == 0 else 0)", output_dir=tmp_path)


def test_a_rank_that_ignores_sigterm_is_killed_with_its_children(tmp_path):
    start = time.monotonic()
    with pytest.raises(RankError, match="boom"):
        run(
            """
            import subprocess
            if rank == 1:
                time.sleep(0.5)
                fail(ValueError("boom"))
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            child = subprocess.Popen(["sleep", "60"])
            open(os.path.join(sys.argv[1], "pids"), "w").write(f"{os.getpid()} {child.pid}")
            time.sleep(60)
            """,
            output_dir=tmp_path,
        )
    assert time.monotonic() - start < 30  # about four; the other one and its child would wait for a minute
    pids = (tmp_path / "pids").read_text().split()
    wait_until(lambda: not any(alive(int(pid)) for pid in pids), seconds=10)  # a killed process needs its turn to end


def test_an_old_error_does_not_fail_a_new_run(tmp_path):
    with pytest.raises(RankError):
        run("fail(ValueError('boom'))", output_dir=tmp_path)
    run("pass", output_dir=tmp_path)


@pytest.mark.parametrize(("drain", "code"), [(10.0, 0), (0.0, 143)])
def test_what_serves_may_end_its_work_after_sigterm(drain, code, tmp_path):
    """A serving rank needs 4 seconds to end; other ranks get 3."""
    program = """
    def end(*_):
        time.sleep(4)
        sys.exit(0)
    signal.signal(signal.SIGTERM, end)
    open(os.path.join(sys.argv[1], 'ready'), 'w').close()
    time.sleep(60)
    """
    parent_program = f"""
    from ztk.core.launch import run_ranks
    run_ranks({command(program, output_dir=tmp_path)!r}, ranks=1, threads=1, output_dir={str(tmp_path)!r}, drain_seconds={drain})
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(parent_program)], cwd=CHECKOUT)
    while not (tmp_path / "ready").is_file():
        assert parent.poll() is None
        time.sleep(0.02)
    parent.terminate()
    assert parent.wait(timeout=30) == code


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_to_the_parent_leaves_no_process_and_no_file(number, code, tmp_path):
    program = "open(os.path.join(sys.argv[1], f'pid{rank}'), 'w').write(str(os.getpid())); time.sleep(60)"
    parent_program = f"""
    import sys
    from ztk.core.launch import run_ranks
    try:
        run_ranks({command(program, output_dir=tmp_path)!r}, ranks=2, threads=1, output_dir={str(tmp_path)!r})
    except KeyboardInterrupt:
        sys.exit(130)
    """
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(parent_program)], cwd=CHECKOUT, env=environment)
    files = [tmp_path / f"pid{rank}" for rank in range(2)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    parent.send_signal(number)
    assert parent.wait(timeout=10) == code
    wait_until(lambda: not any(alive(int(file.read_text())) for file in files), seconds=2)
    assert list(temporary.iterdir()) == []


def wait_until(holds, *, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def test_gpu_memory_grows_in_segments_unless_the_user_sets_it(tmp_path, monkeypatch):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert allocator_settings() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    program = 'print(os.environ["PYTORCH_ALLOC_CONF"])'
    run(program, output_dir=tmp_path)
    assert log_path(tmp_path, rank=1).read_text() == "expandable_segments:True\n"
    for name in names:
        monkeypatch.setenv(name, "max_split_size_mb:64")
        assert allocator_settings() == {}
        monkeypatch.delenv(name)


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
