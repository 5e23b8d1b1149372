"""Runs `run.py` of one tree with several command lines, one after another, and imports torch only once.

    python scripts/run_configurations.py TREE FILE

FILE is a JSON list of objects {"ranks": 2, "arguments": ["zero=stage3", ...], "log": "PATH"}. The process imports torch and the tree's training
program, then forks the ranks of each command line with torchrun's variables, as `run.py` expects. Prints one line of rank exit codes per
command line; exit code 1 if one of them is not 0.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

# Modules that every rank needs. If a tree lacks one, the ranks import it themselves.
PRELOADED = (
    "torch",
    "torch.distributed",
    "numpy",
    "hydra",
    "rich.table",
    "matplotlib.pyplot",
    "ztk.experiments.pretrain",
)
SECONDS = 300  # for one command line


def main() -> int:
    tree, lines = Path(sys.argv[1]).resolve(), json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    os.chdir(tree)
    sys.path[0] = str(tree)  # replaces this script's folder
    os.environ |= {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "PYTHONPATH": str(tree)}  # before torch is imported
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    failed = False
    for line in lines:
        codes = run_line(line)
        print(json.dumps(codes), flush=True)
        failed |= any(codes)
    return int(failed)


def run_line(line: dict) -> list[int]:
    """The exit codes of the ranks of one command line; -SIGKILL for ranks that were still running after `SECONDS`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(line["ranks"]), "LOCAL_WORLD_SIZE": str(line["ranks"])}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    running, codes = {}, [0] * line["ranks"]
    for rank in range(line["ranks"]):
        child = os.fork()
        if child == 0:
            os.environ |= world | address | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            be_rank(line["arguments"], log=line["log"])
        running[child] = rank
    deadline = time.monotonic() + SECONDS
    while running:
        for child in list(running):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[running.pop(child)] = os.waitstatus_to_exitcode(status)
        if any(codes) or time.monotonic() > deadline:
            deadline = min(deadline, time.monotonic() + 5)  # time for the others to end before they are killed
        if running and time.monotonic() > deadline:
            for child in running:
                os.kill(child, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.01)
    return codes


def be_rank(arguments: list[str], *, log: str) -> None:
    """Never returns: a forked process must not run its parent's exit handlers."""
    with open(log, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["run.py", *arguments]
    code = 1
    try:
        runpy.run_path("run.py", run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(int(code))


if __name__ == "__main__":
    sys.exit(main())
