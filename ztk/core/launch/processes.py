"""A group of child processes: when one fails or a signal arrives, all of them end.

The parent uses no GPU and computes nothing, so it may fork and it handles a signal at once. Each child leads its own process group: Ctrl-C
in the terminal reaches only the parent, which then stops every group. Children also ask the kernel to kill them when the parent dies.

[Note: Forking with threads]
While ranks start, the parent's heartbeat thread runs, and an idle thread of torch if it has tokenised a text. A fork has neither thread,
but keeps the locks that they hold. It acquires none of these. The forking thread holds Python's lock, so the other threads wait for it or
are in a system call. CPython and glibc reinitialise their own locks (imports, memory, files, the loader) in the fork. Until the new program
replaces the process, the fork makes only the system calls of `before_start`, which are resolved before. Do not add anything there that
takes a lock.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ztk.core.launch.errors import RankFailure, failure_of_exit
from ztk.core.launch.signals import raise_noted
from ztk.core.policies.ending import ENDING

_POLL_SECONDS = 0.05
_REPEAT_SECONDS = 0.5  # a repeated signal within it is ignored: a terminal and a wrapper may both forward a Ctrl-C
_LAST_WORDS_SECONDS = 0.7  # for the peers of a failed rank to write their errors
_GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL
_GRACE_AFTER_FAILURE_SECONDS = 1.5  # the same for peers of a failed rank: one that hangs may be in any call
_KILL_SECONDS = 1.0  # for processes to end after SIGKILL
# From the end of one rank to the end of all. docs/inference.md promises 5 seconds, including the launcher's own writes.
MOST_SECONDS_AFTER_FAILURE = 2 * _POLL_SECONDS + _LAST_WORDS_SECONDS + _GRACE_AFTER_FAILURE_SECONDS + _KILL_SECONDS
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Child:
    """One process. environment: all its variables. log: file for its output; None for the terminal. cores: the CPU cores it may use.

    has_keyboard: it reads the terminal and gets its Ctrl-C, for a debugger.
    """

    rank: int
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path | None = None
    cores: tuple[int, ...] | None = None
    has_keyboard: bool = False


def _silent(rank: int) -> None:
    return None


def _nothing() -> None:
    return None


def start_process(child: Child, *, log: IO | None) -> subprocess.Popen:
    """Starts the command of one child. log: file for its output; None for the terminal."""
    process = subprocess.Popen(
        child.command,
        env=child.environment,
        stdin=None if child.has_keyboard else subprocess.DEVNULL,
        stdout=log,
        stderr=None if log is None else subprocess.STDOUT,
        preexec_fn=before_start(cores=child.cores),  # noqa: PLW1509 - see [Note: Forking with threads]
    )
    if child.has_keyboard:
        _give_keyboard(process.pid)
    return process


def _give_keyboard(group: int) -> None:
    """Puts a process group into the terminal's foreground. Without a terminal, standard input is a pipe, which any process may read."""
    if not sys.stdin.isatty():
        return
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # sent to a group in the background that does this
    try:
        with suppress(ProcessLookupError, PermissionError):  # the group has ended
            os.tcsetpgrp(sys.stdin.fileno(), group)
    finally:
        signal.signal(signal.SIGTTOU, before)


def before_start(*, cores: Sequence[int] | None, parent: int | None = None) -> Callable[[], None]:
    """Returns a child's `preexec_fn`: it makes the child lead a process group, pins it to its cores, and ends it with its parent.

    parent: process id. Defaults to this process.
    """
    expected = os.getpid() if parent is None else parent
    # A look-up in the fork could wait for the loader's lock.
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def before_exec() -> None:
        os.setpgrp()
        if cores is not None:
            os.sched_setaffinity(0, cores)
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != expected:  # the parent died before prctl
                os.kill(os.getpid(), signal.SIGKILL)

    return before_exec


def run_children(
    children: Sequence[Child],
    *,
    failure_of: Callable[[int], RankFailure | None] = _silent,
    drain_seconds: float = 0.0,
    save_seconds: float = 0.0,
    on_signal: Callable[[], None] = _nothing,
) -> list[RankFailure]:
    """Runs all children and returns when they have ended. Returns the failures in order of rank, or an empty list.

    failure_of: returns the failure that a rank has written about itself, or None. drain_seconds: time that serving children have after a
    signal to end by themselves; ending well after it is no failure, except after SIGINT. save_seconds: time that training children have
    after a signal to finish and save their step; 0 if they save nothing. on_signal: called before that wait. A second signal ends all
    children at once.

    Raises KeyboardInterrupt after SIGINT, SystemExit(128 + signal) after the others of `ENDING` and SIGHUP. In every case all have ended
    before.
    """
    processes: list[subprocess.Popen] = []
    with _signals() as received, ExitStack() as logs:
        raise_noted()
        try:
            for child in children:
                log = None if child.log is None else logs.enter_context(open(child.log, "w"))
                processes.append(start_process(child, log=log))
            failures = _watch(processes, children=children, received=received, failure_of=failure_of)
            if received and save_seconds:
                on_signal()
                _let_save(processes, received=received, seconds=save_seconds)
        finally:
            grace = _GRACE_SECONDS + drain_seconds if received else _GRACE_AFTER_FAILURE_SECONDS
            _stop(processes, received=received, grace_seconds=grace, saves=bool(save_seconds))
            if any(child.has_keyboard for child in children):
                _give_keyboard(os.getpgrp())
    drained = bool(drain_seconds) and all(process.returncode == 0 for process in processes)
    if received and not (received[0] in ENDING and received[0] != signal.SIGINT and drained):
        raise KeyboardInterrupt if received[0] == signal.SIGINT else SystemExit(128 + received[0])
    return failures


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects the signals of `ENDING` and SIGHUP instead of acting on them. With `nohup`, SIGHUP stays ignored."""
    received: list[int] = []
    newest = -_REPEAT_SECONDS

    def receive(number: int, frame: object) -> None:
        nonlocal newest
        now = time.monotonic()
        if not received or now - newest >= _REPEAT_SECONDS:
            received.append(number)
            newest = now

    kinds = (*ENDING, *([] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]))
    before = {kind: signal.signal(kind, receive) for kind in kinds}
    try:
        yield received
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _watch(
    processes: list[subprocess.Popen],
    *,
    children: Sequence[Child],
    received: list[int],
    failure_of: Callable[[int], RankFailure | None],
) -> list[RankFailure]:
    """Waits until all have ended, one has failed, or a signal arrives. Returns the failures."""
    ended: dict[int, float] = {}
    patience: float | None = None
    while not received:
        for place, process in enumerate(processes):
            if place not in ended and process.poll() is not None:
                ended[place] = time.time()
                if process.returncode != 0 and patience is None:
                    patience = time.monotonic() + _LAST_WORDS_SECONDS
        if len(ended) == len(processes) or (patience is not None and time.monotonic() > patience):
            break
        time.sleep(_POLL_SECONDS)
    failures = []
    for place, (child, process) in enumerate(zip(children, processes, strict=True)):
        own = failure_of(child.rank)
        if own is not None:
            failures.append(own)
        elif place in ended and process.returncode != 0:
            failures.append(failure_of_exit(process.returncode, rank=child.rank, noticed=ended[place]))
    return failures


def _let_save(processes: list[subprocess.Popen], *, received: list[int], seconds: float) -> None:
    """Sends SIGTERM to the children alone: processes that they started, such as a tracker, are still needed. Returns when all have ended,
    when one has failed (the others then wait forever), after `seconds`, or after another signal."""
    for process in processes:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
    end = time.monotonic() + seconds
    while time.monotonic() < end and len(received) < 2:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return
        if any(code is not None and (code < 0 or code == 1) for code in codes):
            end = min(end, time.monotonic() + _LAST_WORDS_SECONDS)
        time.sleep(_POLL_SECONDS)


def _stop(processes: list[subprocess.Popen], *, received: list[int], grace_seconds: float, saves: bool) -> None:
    """Sends SIGTERM, then SIGKILL, to every child's process group unless all ended well. A second Ctrl-C skips the grace period.

    saves: also sends SIGHUP, because a child would finish its step after SIGTERM, and its peers may have ended.
    """
    if all(process.poll() == 0 for process in processes):
        return
    for kind, seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, _KILL_SECONDS)):
        for process in processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, kind)  # also ends processes that an ended child left in its group
                if saves and process.poll() is None:
                    os.kill(process.pid, signal.SIGHUP)  # children have no handler for it
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(process.poll() is None for process in processes) and len(received) < 2:
            time.sleep(_POLL_SECONDS)
    for process in processes:
        process.wait()
