"""python -m ztk.cli.rank_server SOCKET: imports the modules of a rank once and forks ranks on request; see `ztk.core.launch.forks`.

Reads one JSON line per rank. Replies with {"pid": n}, and with {"ended": n, "code": c} when the rank ends.
"""

import json
import os
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

from ztk.core.launch.processes import before_start

_POLL_SECONDS = 0.02
_PROGRAM = "ztk.experiments.pretrain"


def main() -> list[str]:
    """Serves requests until the socket closes, and then ends the process. In a forked rank, returns its `sys.argv`."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    _import()
    server = os.getpid()
    waiting, running = b"", set[int]()
    while True:
        readable = select.select([connection], [], [], _POLL_SECONDS if running else None)[0]
        if readable:
            received = connection.recv(1 << 16)
            if not received:
                _end(running)
            *lines, waiting = (waiting + received).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    connection.close()
                    return _become(json.loads(line), server=server)
                with suppress(OSError):
                    os.setpgid(
                        pid, pid
                    )  # the fork does this too; here it comes before the reply, so that the group can be signalled at once
                running.add(pid)
                _answer(connection, {"pid": pid})
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                _answer(connection, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _import() -> None:
    """Imports the modules that every rank needs.

    Raises if this starts a thread: a forked rank would lack the thread but inherit the locks that it holds.
    """
    from ztk.worker import import_task

    import_task(_PROGRAM)
    if threading.active_count() > 1:
        raise RuntimeError(
            f"imports started the threads {threading.enumerate()}: a process with threads cannot be forked safely"
        )


def _become(request: dict[str, Any], *, server: int) -> list[str]:
    """Turns this fork into the process that `subprocess` would have started. Returns its arguments. server: pid of the parent."""
    before_start(cores=request["cores"], parent=server)()
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["log"] is not None:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    return request["arguments"]


def _answer(connection: socket.socket, values: dict[str, int]) -> None:
    try:
        connection.sendall((json.dumps(values) + "\n").encode())
    except OSError:
        _end(set())


def _end(running: set[int]) -> None:
    for pid in running:
        os.killpg(pid, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    sys.argv = main()
    from ztk import worker

    worker.main()
