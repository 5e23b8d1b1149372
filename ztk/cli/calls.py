"""`ztk.run` and `ztk.sweep`: the command line from Python, in a script or a Jupyter kernel.

Each call runs in a child process. A kernel has an event loop, threads, signal handlers and perhaps a CUDA context, none of which survive
a fork, and a failed rank must not affect the kernel.
"""

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ztk.cli.child import LINE_REFUSED
from ztk.core.launch import ExternalRank, python_path, quoted
from ztk.core.policies.key import written
from ztk.report.sweep import SWEEP, read_sweep

if TYPE_CHECKING:
    from ztk.report.history import Runs

ConfigDir = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
_TAIL_LINES = 60
_TERMINAL = (
    "FORCE_COLOR",
    "CLICOLOR_FORCE",
)  # set by a kernel for its cells; a child must not inherit them, because a notebook cannot draw its progress bar
_REFUSED, _INTERRUPTED = 2, 130
_PLACES = ("hydra.run.dir=", "hydra.sweep.dir=", "sweep.resume=")


class RunFailed(RuntimeError):
    """A run, or a job of a sweep, failed. The message names the first cause; `folder` has the record."""

    def __init__(self, text: str, *, folder: Path) -> None:
        super().__init__(text)
        self.folder = folder

    def __reduce__(self) -> tuple:
        return (_failed_again, (str(self), self.folder))


def run(
    *overrides: str,
    folder: str | os.PathLike[str] | None = None,
    config_dir: ConfigDir = None,
    quiet: bool = False,
    **keys: Any,
) -> "Runs":
    """Starts one run like `python run.py OVERRIDES`, waits for its end and returns its record.

        done = ztk.run("zero=stage3", "train.steps=20", model="tiny", **{"data.seq_len": 64})
        done.runs.iloc[0]["tokens_per_second"]

    An interrupt (Ctrl-C or a kernel's stop button) first stops the ranks and then raises here. The ranks also stop if this process dies.

    Args:
        *overrides: Words of the command line.
        folder: Folder of the run. Defaults to a new one below `outputs/`. An existing run of the same configuration is continued: a finished
            run does not run again.
        config_dir: Folder with options of your own, or several, as `--config-dir`; see docs/extending.md.
        quiet: Suppresses the run's output. Errors still contain their cause.
        **keys: Overrides as keywords.

    Returns:
        Frames with one run; see `ztk.load`. `.folder` is the run's folder.

    Raises:
        ValueError: The configuration is invalid, or this process is itself a rank.
        RunFailed: A rank failed. The message names the first cause.
    """
    words = command_words(overrides, keys=keys)
    place = _place(folder, parent="outputs")
    _command([*flags_of(config_dir), *words, f"hydra.run.dir={quoted(place)}"], folder=place, quiet=quiet)
    return _load(place)


def sweep(
    *overrides: str,
    folder: str | os.PathLike[str] | None = None,
    config_dir: ConfigDir = None,
    check: bool = True,
    quiet: bool = False,
    **keys: Any,
) -> "Runs":
    """Runs the jobs of a grid like `python run.py -m OVERRIDES` and returns their records.

        found = ztk.sweep("model=tiny", zero=["stage0", "stage3"], **{"sweep.repeats": 5})
        found.summary("zero", metric="tokens_per_second")

    Args:
        *overrides: Words of the command line.
        folder: Folder of the sweep. An existing sweep is continued: finished jobs do not run again, so a notebook cell can be repeated.
        config_dir: As in `ztk.run`.
        check: Raises RunFailed for failed or refused jobs. With False, such jobs are rows with their `status`.
        quiet: Suppresses the runs' output.
        **keys: Overrides as keywords. A list is a range of the grid.

    Raises:
        ValueError: The command line is invalid.
        RunFailed: Jobs failed or were refused. The message names each with its cause.
    """
    words = command_words(overrides, keys=keys)
    place = _place(folder, parent="multirun")
    where = "sweep.resume" if (place / SWEEP).exists() else "hydra.sweep.dir"
    grid = [] if any(word.startswith("sweep=") for word in words) else ["-m"]
    _command([*flags_of(config_dir), *grid, *words, f"{where}={quoted(place)}"], folder=place, quiet=quiet, check=check)
    return _load(place)


def config_dirs(given: ConfigDir) -> list[str]:
    """Returns the folders of `config_dir`, absolute.

    Raises:
        ValueError: a folder does not exist.
    """
    listed = [] if given is None else [given] if isinstance(given, str | os.PathLike) else given
    folders = [os.path.abspath(folder) for folder in listed]
    if missing := [folder for folder in folders if not os.path.isdir(folder)]:
        raise ValueError(f"config_dir={missing[0]}: there is no such folder")
    return folders


def flags_of(given: ConfigDir) -> list[str]:
    """Returns `config_dir` as flags of the command line."""
    return [f"--config-dir={folder}" for folder in config_dirs(given)]


def command_words(overrides: Sequence[str], *, keys: dict[str, Any]) -> list[str]:
    """Converts overrides and keywords to words of the command line.

    Raises:
        ValueError: a word is not an override or sets the folder, a key has two values, or this process is itself a rank.
    """
    words = [*overrides, *(f"{key}={_text(value)}" for key, value in keys.items())]
    for word in words:
        if not isinstance(word, str) or word.startswith("-"):
            raise ValueError(
                f"{word!r}: is not an override; write key=value, ztk.sweep for -m, config_dir=FOLDER for --config-dir"
            )
        if word.startswith("launch.debug=") and not word.endswith("=null"):
            raise ValueError(f"{word}: needs a terminal, which a call has not; start `python run.py` in one")
        if word in ("launch=slurm", "launch.starter=slurm"):
            raise ValueError(f"{word}: submits a job and does not wait for it; use `python run.py {word} ...`")
        if word.startswith(_PLACES):
            raise ValueError(f"{word}: cannot be set here; pass folder=FOLDER instead")
    from ztk.config import check_doubled  # imported late because it imports Hydra

    check_doubled(words)
    if (rank := ExternalRank.of_environment()) is not None:
        raise ValueError(
            f"this process is rank {rank.rank} that {rank.starter} started: call ztk.run in a process without RANK"
        )
    return words


def _text(value: Any) -> str:
    """Formats a value for the command line: a list is a range of the grid, a nested list is one value."""
    if isinstance(value, (list, tuple)):
        return ",".join(f"[{_text(one)}]" if isinstance(one, (list, tuple)) else _text(one) for one in value)
    return written(value)


def _place(folder: str | os.PathLike[str] | None, *, parent: str) -> Path:
    """Returns the folder of the run. Defaults to the name that `conf/config.yaml` gives new runs."""
    return Path(folder or Path(parent, f"{datetime.now():%Y-%m-%d/%H-%M-%S-%f}")).absolute()


def _command(words: Sequence[str], *, folder: Path, quiet: bool, check: bool = True) -> None:
    """Runs the command to its end. Raises according to its exit code and the record in its folder."""
    # MPLBACKEND: a kernel's backend draws into the notebook, which a rank does not have.
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
        process_group=0,  # signals then reach this process only, which forwards them once
    )
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            tail.append(line)
            if not quiet:
                with suppress(OSError, ValueError):  # as on a full disk; output ends no run
                    sys.stdout.write(line)
        process.wait()
    except BaseException:
        _stop(process, output=process.stdout)
        raise
    finally:
        process.stdout.close()
    _raise_for(process.returncode, folder=folder, tail=list(tail), check=check)


def _stop(process: subprocess.Popen, *, output: IO[str]) -> None:
    """Interrupts the command, which then stops its ranks. A second interrupt kills both."""
    process.send_signal(signal.SIGINT)
    try:
        for _ in output:  # a full pipe would block the command
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
    """Yields one line per unfinished job, or one for the run of `folder`."""
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
