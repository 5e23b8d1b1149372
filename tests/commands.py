"""`python run.py ...` as a fork of the interpreter that forks the ranks of `RankPool`: torch is imported once for many commands.

The command forks its ranks, too. Its effects, output and exit codes equal run.py's, which tests/cli/test_run.py compares. But where a run
ends, it draws no picture and a shorter text: tests/cli/test_wheel.py has both.
"""

import atexit
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from tests.ranks import forkserver
from ztk.core.launch import processes
from ztk.core.launch.processes import Child, before_start

TIMEOUT_SECONDS = 240
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_command(
    *arguments: str, cwd: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `python run.py ARGUMENTS` in `cwd`. environment: variables in addition to this process's own."""
    files = [cwd.parent / f"{cwd.name}.{name}" for name in ("stdout", "stderr")]
    told = {
        "arguments": arguments,
        "cwd": str(cwd),
        "environment": os.environ | (environment or {}),
        "files": [str(file) for file in files],
    }
    process = forkserver().Process(target=_command, kwargs=told)
    process.start()
    process.join(TIMEOUT_SECONDS)
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)  # its ranks end with it
        process.join()
        raise subprocess.TimeoutExpired(["run.py", *arguments], TIMEOUT_SECONDS)
    printed = [file.read_text() for file in files]
    for file in files:
        file.unlink()
    return subprocess.CompletedProcess(["run.py", *arguments], process.exitcode, *printed)


def _command(arguments: tuple[str, ...], cwd: str, environment: dict[str, str], files: list[str]) -> None:
    before_start(cores=None, parent=os.getppid())()
    _become(["run.py", *arguments], environment=environment, files=files)
    os.chdir(cwd)
    from ztk.cli import main

    processes.start_process = _ForkedRank
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code
    _leave(code)


class _ForkedRank:
    """A rank of the command, as `subprocess.Popen` shows a process."""

    def __init__(self, child: Child, *, log: IO | None) -> None:
        self.returncode: int | None = None
        prepare = before_start(cores=child.cores)
        sys.stdout.flush()
        sys.stderr.flush()
        # Until the fork has its own handlers: this process's would note a signal that is the fork's.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self.pid = os.fork()
        if self.pid == 0:
            _be_rank(child, log=log, prepare=prepare)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def poll(self) -> int | None:
        return self._ask(os.WNOHANG)

    def wait(self) -> int:
        return self._ask(0)

    def _ask(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _be_rank(child: Child, *, log: IO | None, prepare) -> None:
    """Runs `python -m ztk.worker`. Never returns."""
    code = 1
    try:
        prepare()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        words = list(child.command[child.command.index("-m") + 1 :])
        _become(words, environment=dict(child.environment), files=[] if log is None else [log.name] * 2)
        from ztk import worker
        from ztk.experiments import pretrain
        from ztk.report import reporter

        # The picture takes 0.4 s, and on every rank a text of 160 bytes as long.
        pretrain.SAMPLE_BYTES = pretrain.SAMPLE_TOKENS = 8
        reporter._draw = lambda folder: None
        worker.main()
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _leave(code)


def _become(arguments: list[str], *, environment: dict[str, str], files: list[str]) -> None:
    """files: standard output and standard error are appended to them."""
    sys.argv = arguments
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, file in enumerate(files, start=1):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)


def _leave(code: int | str | None) -> None:
    """Ends as the interpreter does, without its last collections."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
