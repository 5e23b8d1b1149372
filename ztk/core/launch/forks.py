"""Ranks forked from one interpreter that has imported torch and ztk, so that many runs pay for the imports once.

Only for ranks on the CPU: a process that has used CUDA cannot be forked. The interpreter (`ztk.cli.rank_server`) computes nothing and
starts no thread, so a fork equals a new process after its imports.
"""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from select import select
from typing import IO

from ztk.core.launch.processes import Child, before_start

SERVER = "ztk.cli.rank_server"
_POLL_SECONDS = 0.02
_LOST = -9  # the exit code of a rank whose interpreter was killed, which ends its forks, too


class Forker:
    """Forks children from an interpreter that it starts. threads: number of each rank's threads, which libraries read when they are loaded.

    The interpreter and its forks end with `close`, and with the process that created this object.
    """

    def __init__(self, *, threads: int, environment: dict[str, str]) -> None:
        own, other = socket.socketpair()
        self.threads = threads
        self._codes: dict[int, int] = {}
        self._made: list[int] = []  # process id of the requested rank
        self._is_lost, self._rest = False, b""
        with other:
            self._server = subprocess.Popen(
                [sys.executable, "-m", SERVER, str(other.fileno())],
                env=environment | {"OMP_NUM_THREADS": str(threads)},
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                preexec_fn=before_start(cores=None),  # noqa: PLW1509 - see [Note: Forking with threads]
            )
        self._socket = own

    def start(self, child: Child, *, log: IO | None) -> "ForkedRank":
        """Forks one rank, equivalent to `python -m ztk.worker`. log: file for its output. If None, it writes to the terminal.

        Raises:
            OSError: the interpreter has ended.
        """
        request = {
            "arguments": list(child.command[child.command.index("-m") + 1 :]),
            "environment": dict(child.environment),
            "log": None if log is None else os.fspath(log.name),
            "cores": child.cores,
        }
        self._socket.sendall((json.dumps(request) + "\n").encode())
        while not self._made:
            self._receive()
        return ForkedRank(forker=self, pid=self._made.pop())

    def code_of(self, pid: int) -> int | None:
        """The exit code of a rank, negative after a signal; None while it runs."""
        while pid not in self._codes and not self._is_lost and select([self._socket], [], [], 0)[0]:
            with suppress(OSError):
                self._receive()
        return self._codes.get(pid, _LOST if self._is_lost else None)

    def close(self) -> None:
        """Ends the interpreter. Idempotent."""
        self._is_lost = True
        self._socket.close()
        self._server.kill()
        self._server.wait()

    def _receive(self) -> None:
        """Reads all available answers, and waits for one if there is none. Raises OSError if the interpreter has ended."""
        received = self._socket.recv(1 << 16)
        if not received:
            self._is_lost = True
            raise ConnectionResetError("the interpreter that starts ranks has ended; see its output above")
        *lines, self._rest = (self._rest + received).split(b"\n")
        for answer in map(json.loads, lines):
            if "pid" in answer:
                self._made.append(answer["pid"])
            else:
                self._codes[answer["ended"]] = answer["code"]


class ForkedRank:
    """A forked rank with the interface of `subprocess.Popen`."""

    def __init__(self, *, forker: Forker, pid: int) -> None:
        self.pid, self._forker = pid, forker
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        if self.returncode is None:
            self.returncode = self._forker.code_of(self.pid)
        return self.returncode

    def wait(self) -> int:
        """Returns the exit code when it has ended."""
        while (code := self.poll()) is None:
            time.sleep(_POLL_SECONDS)
        return code
