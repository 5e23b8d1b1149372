"""Starts the ranks of one run as child commands, watches them, and leaves none behind.

The parent imports no torch, has no threads and holds no GPU, so it may fork and it answers a signal at once. Ranks meet
through a file store (no port, no race). Each rank leads its own process group: a Ctrl-C of the terminal reaches the
parent alone, which then stops every group. Ranks also ask the kernel to be killed when the parent dies.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ztk.launch.errors import RankError, RankFailure, error_path, failure_of_exit, first_cause, log_path, read_failure

_POLL_SECONDS = 0.05
_LAST_WORDS_SECONDS = 0.7  # for the peers of a failed rank to say what they saw
_GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL
_PR_SET_PDEATHSIG = 1


def run_ranks(command: Sequence[str], *, ranks: int, threads: int, output_dir: str | os.PathLike) -> None:
    """Runs `command` once per rank and returns when all have ended well.

    Environment of a rank: `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `ZTK_STORE` (path of the file store),
    `OMP_NUM_THREADS`. Rank 0 has the terminal, the others write `ranks/rank{r}.log` in `output_dir`.

    Raises RankError with the first cause when a rank fails, KeyboardInterrupt after SIGINT, SystemExit(128 + signal)
    after SIGTERM and SIGHUP. In every case all ranks have ended before.
    """
    Path(output_dir, "ranks").mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        error_path(output_dir, rank=rank).unlink(missing_ok=True)
    folder = tempfile.mkdtemp(prefix="ztk_")
    processes: list[subprocess.Popen] = []
    try:
        with _signals() as received, ExitStack() as logs:
            try:
                for rank in range(ranks):
                    environment = _environment(rank, ranks=ranks, threads=threads, store=os.path.join(folder, "store"))
                    log = None if rank == 0 else logs.enter_context(open(log_path(output_dir, rank=rank), "w"))
                    processes.append(_start(command, environment=environment, log=log))
                failures = _watch(processes, received=received, output_dir=output_dir)
            finally:
                _stop(processes, received=received)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if received:
        raise KeyboardInterrupt if received[0] == signal.SIGINT else SystemExit(128 + received[0])
    if failures:
        cause = first_cause(failures)
        raise RankError(cause, log=str(log_path(output_dir, rank=cause.rank)))


def worker_command(config_path: str | os.PathLike) -> list[str]:
    """What starts one rank of the run that `config_path` describes."""
    return [sys.executable, "-m", "ztk.worker", os.fspath(config_path)]


def _environment(rank: int, *, ranks: int, threads: int, store: str) -> dict[str, str]:
    checkout = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([checkout, *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "ZTK_STORE": store,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": path,
    }
    return os.environ | own


def _start(command: Sequence[str], *, environment: dict[str, str], log) -> subprocess.Popen:
    parent = os.getpid()
    libc = ctypes.CDLL(None)

    def before_exec() -> None:
        os.setpgrp()
        if sys.platform == "linux":
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before prctl
                os.kill(os.getpid(), signal.SIGKILL)

    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=None if log is None else subprocess.STDOUT,
        preexec_fn=before_exec,
    )


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGINT, SIGTERM and SIGHUP instead of acting on them."""
    received: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {kind: signal.signal(kind, lambda number, frame: received.append(number)) for kind in kinds}
    try:
        yield received
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _watch(
    processes: list[subprocess.Popen], *, received: list[int], output_dir: str | os.PathLike
) -> list[RankFailure]:
    """Waits for the end of all ranks, of one that failed, or for a signal. Returns what failed."""
    ended: dict[int, float] = {}
    patience: float | None = None
    while not received:
        for rank, process in enumerate(processes):
            if rank not in ended and process.poll() is not None:
                ended[rank] = time.time()
                if process.returncode != 0 and patience is None:
                    patience = time.monotonic() + _LAST_WORDS_SECONDS
        if len(ended) == len(processes) or (patience is not None and time.monotonic() > patience):
            break
        time.sleep(_POLL_SECONDS)
    failures = []
    for rank, process in enumerate(processes):
        told = read_failure(output_dir, rank=rank)
        if told is not None:
            failures.append(told)
        elif rank in ended and process.returncode != 0:
            failures.append(failure_of_exit(process.returncode, rank=rank, noticed=ended[rank]))
    return failures


def _stop(processes: list[subprocess.Popen], *, received: list[int]) -> None:
    """SIGTERM, then SIGKILL, to every rank's process group unless all ended well; a second Ctrl-C skips the grace."""
    if all(process.poll() == 0 for process in processes):
        return
    for kind, seconds in ((signal.SIGTERM, _GRACE_SECONDS), (signal.SIGKILL, 1.0)):
        for process in processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, kind)  # also what an ended rank has left in its group
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(process.poll() is None for process in processes) and len(received) < 2:
            time.sleep(_POLL_SECONDS)
    for process in processes:
        process.wait()
