"""`ztk.run` and `ztk.sweep`: the command line from Python, in a script or a live Jupyter kernel.

The run is a child command. A kernel has an event loop, threads and signal handlers of its own, and perhaps a CUDA context: nothing of it
may be forked, and ranks that fail must leave the kernel as it was.
"""

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ztk.cli.child import LINE_REFUSED
from ztk.core.launch import ExternalRank, python_path
from ztk.report.sweep import SWEEP, read_sweep

if TYPE_CHECKING:
    from ztk.report.history import Runs

_TAIL_LINES = 60
_TERMINAL = (
    "FORCE_COLOR",
    "CLICOLOR_FORCE",
)  # a kernel sets them for what its cells start; a notebook draws no progress bar
_REFUSED, _INTERRUPTED = 2, 130
_PLACES = ("hydra.run.dir=", "hydra.sweep.dir=", "sweep.resume=")


class RunFailed(RuntimeError):
    """A run, or a job of a sweep, has failed. The text names the first cause; `folder` has the record."""

    def __init__(self, text: str, *, folder: Path) -> None:
        super().__init__(text)
        self.folder = folder

    def __reduce__(self) -> tuple:
        return (_failed_again, (str(self), self.folder))


def run(*overrides: str, folder: str | os.PathLike | None = None, quiet: bool = False, **keys: Any) -> "Runs":
    """Starts one run as `python run.py OVERRIDES` does, waits for its end and reads it back.

        done = ztk.run("zero=stage3", "train.steps=20", model="tiny", **{"data.seq_len": 64})
        done.runs.iloc[0]["tokens_per_second"]

    overrides: words of the command line. keys: the same as keywords. folder: of the run; None: a new one below `outputs/`. quiet: prints
    nothing of what the run prints; an error still has its cause. Returns frames with one run, see `ztk.load`; `.folder` is the run's.
    An interrupt (Ctrl-C, a kernel's stop button) ends the ranks before it goes on here, and the ranks end with this process.

    Raises:
        ValueError: the configuration is refused, or this process is itself a rank.
        RunFailed: a rank failed; the text names the first cause.
    """
    words = command_words(overrides, keys=keys)
    place = _place(folder, parent="outputs")
    _command([*words, f"hydra.run.dir={_quoted(place)}"], folder=place, quiet=quiet)
    return _load(place)


def sweep(
    *overrides: str, folder: str | os.PathLike | None = None, check: bool = True, quiet: bool = False, **keys: Any
) -> "Runs":
    """Runs the jobs of a grid as `python run.py -m OVERRIDES` does, and reads all back.

        found = ztk.sweep("model=tiny", zero=["stage0", "stage3"], **{"sweep.repeats": 5})
        found.summary("zero", metric="tokens_per_second")

    overrides, quiet: as in `run`. keys: a list is a range of the grid. folder: of the sweep; one that has a sweep goes on with it, so a cell
    that is executed again starts nothing that is done. check: False: jobs that failed or were refused are rows with their
    `status`, and raise nothing.

    Raises:
        ValueError: the command is refused.
        RunFailed: jobs failed or were refused; the text names each with its cause.
    """
    words = command_words(overrides, keys=keys)
    place = _place(folder, parent="multirun")
    where = "sweep.resume" if (place / SWEEP).exists() else "hydra.sweep.dir"
    grid = [] if any(word.startswith("sweep=") for word in words) else ["-m"]
    _command([*grid, *words, f"{where}={_quoted(place)}"], folder=place, quiet=quiet, check=check)
    return _load(place)


def command_words(overrides: Sequence[str], *, keys: dict[str, Any]) -> list[str]:
    """Overrides and keywords as words of the command line.

    Raises:
        ValueError: a word is no override or names a folder, a key has two values, or this process is itself a rank.
    """
    words = [*overrides, *(f"{key}={_text(value)}" for key, value in keys.items())]
    for word in words:
        if not isinstance(word, str) or word.startswith("-"):
            raise ValueError(f"{word!r}: is no override; write key=value, and start sweeps by ztk.sweep")
        if word.startswith(_PLACES):
            raise ValueError(f"{word}: is what `folder` says here; leave it out and give folder=FOLDER")
    from ztk.config import check_doubled  # here: it brings Hydra

    check_doubled(words)
    if (rank := ExternalRank.of_environment()) is not None:
        raise ValueError(
            f"this process is rank {rank.rank} that {rank.starter} started: call ztk.run in a process without RANK"
        )
    return words


def _text(value: Any) -> str:
    """A value as the command line writes it: a list is a range of the grid, a list in it one value."""
    if isinstance(value, (list, tuple)):
        return ",".join(f"[{_text(one)}]" if isinstance(one, (list, tuple)) else _text(one) for one in value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _place(folder: str | os.PathLike | None, *, parent: str) -> Path:
    """Where the run goes; new ones as `conf/config.yaml` names them."""
    return Path(folder or Path(parent, f"{datetime.now():%Y-%m-%d/%H-%M-%S-%f}")).absolute()


def _quoted(path: Path) -> str:
    """As a value in Hydra's grammar."""
    return "'" + str(path).replace("'", "\\'") + "'"


def _command(words: Sequence[str], *, folder: Path, quiet: bool, check: bool = True) -> None:
    """Runs the command to its end; raises what its exit code and its folder say."""
    # MPLBACKEND: a kernel's draws into the notebook, which a rank has none of
    kept = {key: value for key, value in os.environ.items() if key not in _TERMINAL}
    environment = kept | {"PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1", "MPLBACKEND": "agg"}
    process = subprocess.Popen(
        [sys.executable, "-m", "ztk.cli.child", str(os.getpid()), *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,  # an interrupt reaches this process alone, which passes it on once
    )
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            tail.append(line)
            if not quiet:
                sys.stdout.write(line)
        process.wait()
    except BaseException:
        _stop(process, output=process.stdout)
        raise
    finally:
        process.stdout.close()
    _raise_for(process.returncode, folder=folder, tail=list(tail), check=check)


def _stop(process: subprocess.Popen, *, output: IO[str]) -> None:
    """Interrupts the command, which ends its ranks; an impatient second interrupt ends it, and the ranks with it."""
    process.send_signal(signal.SIGINT)
    try:
        for _ in output:  # a full pipe must not keep it from ending
            pass
        process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise


def _raise_for(code: int, *, folder: Path, tail: list[str], check: bool) -> None:
    said = "".join(line.removeprefix("ztk: ") for line in tail if line.startswith(("ztk: ", "  - "))).strip()
    if code == 0:
        return
    if code in (_INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    if code == LINE_REFUSED or (code == _REFUSED and read_sweep(folder) is None):
        raise ValueError(said or "".join(tail))
    failures = list(_failures(folder))
    if not failures:
        raise RunFailed(f"the command ended with code {code}:\n{''.join(tail)}", folder=folder)
    if check:
        raise RunFailed("\n".join(failures), folder=folder)


def _failures(folder: Path) -> Iterator[str]:
    """One line per job that is not done, or for the run of `folder`."""
    from ztk.report.status import Status, read_status, read_summary

    record = read_sweep(folder)
    places = [folder] if record is None else [folder / job.folder for job in record.jobs]
    for place in places:
        state = read_status(place)
        if state not in (Status.done, Status.does_not_fit, Status.pending):
            error = read_summary(place).get("error") or state.name
            yield f"{error} (folder: {place})"


def _load(folder: Path) -> "Runs":
    from ztk.report.history import load

    return load(folder)


def _failed_again(text: str, folder: Path) -> RunFailed:
    return RunFailed(text, folder=folder)
