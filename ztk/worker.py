"""One rank of a run: `python -m ztk.worker CONFIG_YAML` reads the run and calls the task's `main(config)`.

Exit codes: 0 done, 1 failed (the error lies in `ranks/rank{r}.error.json`), 130 interrupted.
"""

import bdb
import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from ztk.config import Config, from_yaml, instantiate
from ztk.core.launch import RankFailure, failure_of, is_restart, log_path, memory_path, write_failure
from ztk.core.launch.output import open_closed_streams
from ztk.core.launch.tee import keep_output, log_to
from ztk.report.folder import write_json


def main() -> None:
    """Runs one rank.

    A failed rank skips all teardown: closing a process group that has lost a member can hang, and the peers would then report the closed
    connection as their own error.
    """
    try:
        config = from_yaml(Path(sys.argv[1]).read_text(encoding="utf-8"))
        rank = int(os.environ["RANK"])
        failure = run_task(config, rank=rank, end=lambda failure: leave(1), logs=rank == 0)
    except KeyboardInterrupt as error:
        leave(interrupt_code(error))
    else:
        if failure is not None:
            leave(1)
        if "triton" not in sys.modules:  # its bindings report leaked objects at exit
            gc.freeze()  # the final collections would traverse all of torch's objects, for 0.6 seconds


def run_task(
    config: Config, *, rank: int, end: Callable[[RankFailure], NoReturn], logs: bool = True
) -> RankFailure | None:
    """Imports the task and runs it. Returns the failure, if any; it is also written to the rank's error file and log.

    end: ends the process after a section that took longer than its limit (`ztk.core.runtime.sections`). It runs in another thread.
    logs: the output also goes to the rank's log, behind the text of an earlier start. False: ztk's launcher writes the log.
    """
    open_closed_streams()
    prefer_own_modules()
    debug = config.launch.debug  # the rank with the terminal, whose output a debugger needs as it is
    if debug == rank:
        os.environ["TTY_COMPATIBLE"] = "0"  # for rich: a progress bar would draw over the debugger's lines
        log = sys.stderr
    else:
        path = log_path(config.output_dir, rank=rank)
        log = log_to(path, appends=is_restart()) if logs and debug is None else keep_output()
    show_messages()

    def record(error: Exception, *, trace: str | None = None) -> RankFailure:
        failure = failure_of(error, rank=rank)
        failure = failure if trace is None else replace(failure, trace=trace)
        log.write(failure.trace)
        write_failure(failure, output_dir=config.output_dir)
        return failure

    try:
        import torch

        from ztk.core.runtime.sections import end_overruns_by

        end_overruns_by(lambda overrun: end(record(overrun, trace=overrun.stacks)))
        torch.set_num_threads(config.launch.threads)
        if "task" in config.own:
            instantiate(config.own["task"], config)
        else:
            _main_of(config.task.module)(config)
    except Exception as raised:
        error = _explained(raised, debug=debug, rank=rank)
        failure = record(error)
        _write_memory(error, output_dir=config.output_dir, rank=rank)
        return failure
    return None


def _explained(error: Exception, *, debug: int | None, rank: int) -> Exception:
    """Returns the error, or for one of pdb's what to do about it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, bdb.BdbQuit):  # Hydra raises another error for an own task's
        cause = cause.__cause__
    if cause is None:
        return error
    quits = "the debugger was quit"
    text = (
        quits if debug == rank else f"breakpoint(): this rank has no terminal; start the run with launch.debug={rank}"
    )
    return ValueError(text).with_traceback(error.__traceback__)


def _main_of(name: str) -> Callable[[Config], None]:
    """The function `main` of the program `name`. Raises ValueError if it has none."""
    program = import_task(name)
    if not hasattr(program, "main"):
        raise ValueError(f"task.module={name}: has no function main(config); write one, or name another module")
    return program.main


def _write_memory(error: Exception, *, output_dir: str, rank: int) -> None:
    """Writes the rank's tensors after an out-of-memory error. A second error is only printed, so that it cannot hide `error`."""
    try:
        from ztk.core.runtime.out_of_memory import is_out_of_memory, memory_state

        if is_out_of_memory(error):
            write_json(memory_path(output_dir, rank=rank), values=asdict(memory_state()))
    except Exception as other:
        sys.stderr.write(f"ztk: rank {rank} cannot list the memory it holds: {other}\n")


def import_task(name: str) -> ModuleType:
    """Imports the program `name`, the only way from ztk's packages to the programs above them."""
    return importlib.import_module(name)


def prefer_own_modules() -> None:
    """Moves the checkout that has ztk behind all other folders of modules.

    Its `experiments`, `conf`, `tests` and `scripts` would hide packages of a user's with these names. ztk itself is imported already.
    """
    root = str(Path(__file__).resolve().parents[1])
    if Path(root, "pyproject.toml").is_file() and root in sys.path:  # not the folder of an installed ztk
        sys.path[:] = [*(folder for folder in sys.path if folder != root), root]


def show_messages() -> None:
    """Logs ztk's messages from INFO on to standard error, unless the program has configured logging itself."""
    logger = logging.getLogger("ztk")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("ztk: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def interrupt_code(error: KeyboardInterrupt) -> int:
    """Returns 128 + the signal that this rank received, or 0 if it stopped because another rank did."""
    number = getattr(error, "number", signal.SIGINT)  # of ztk.core.runtime.interrupts.Interrupted
    return 0 if number is None else 128 + number


def leave(code: int) -> NoReturn:
    """Ends the process at once, after flushing its output."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
