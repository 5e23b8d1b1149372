"""Error files of failing ranks, and the choice of the first cause among several failures.

When one rank fails, its peers fail a moment later because they lost it. A rank therefore writes its error with the time in microseconds,
and marks it `secondary` if the error only reports the loss of another rank.
"""

import json
import os
import platform
import signal
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ztk.core.policies.ending import ENDING
from ztk.core.policies.machine import hosts
from ztk.core.policies.records import replace_file

FAILURES = "ZTK_FAILURES"  # variable of a rank: a file in the launcher's memory
# Names, so that nothing heavy is imported: classes of ztk.core.runtime, then of torch.distributed.
_SECONDARY_TYPES = {"PeerLost", "DistBackendError", "DistNetworkError", "DistStoreError"}
_SECONDARY_TEXTS = (
    *("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe"),
    *("ncclRemoteError", "NCCL communicator was aborted", "Socket Timeout", "wait timeout after"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """time: seconds since 1970. secondary: the error only reports the loss of another rank. trace: may be empty.

    code: exit code of its process, 128 + n after signal n. host: its machine, if the run has several.
    """

    rank: int
    kind: str
    message: str
    trace: str
    time: float
    secondary: bool
    code: int = 1
    host: str = ""

    @property
    def killed(self) -> bool:
        """A signal ended the rank; the other ranks may be started again."""
        return not self.kind and self.code > 128 and not self.secondary

    @property
    def interrupted(self) -> bool:
        """A signal of `ENDING` ended the rank, by its own handler or without one."""
        return self.killed and self.code - 128 in ENDING

    def __str__(self) -> str:
        place = f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"
        return f"{place}: {self.kind}: {self.message}" if self.kind else f"{place} {self.message}"


class RankError(RuntimeError):
    """A run failed. The text is one line about the first cause; `failure` has the details. killed: the ranks that signals ended."""

    def __init__(self, failure: RankFailure, *, log: str, killed: tuple[int, ...] = ()) -> None:
        super().__init__(str(failure))
        self.failure, self.log, self.killed = failure, log, killed

    def __reduce__(self) -> tuple:
        return (_rebuilt, (self.failure, self.log, self.killed))


def _rebuilt(failure: RankFailure, log: str, killed: tuple[int, ...]) -> RankError:
    return RankError(failure, log=log, killed=killed)


def error_path(output_dir: str | os.PathLike, *, rank: int) -> Path:
    """The file of a rank's error."""
    return Path(output_dir, "ranks", f"rank{rank}.error.json")


def memory_path(output_dir: str | os.PathLike, *, rank: int) -> Path:
    """Path of a rank's memory report, written when it runs out of memory."""
    return Path(output_dir, "ranks", f"rank{rank}.memory.json")


def log_path(output_dir: str | os.PathLike, *, rank: int) -> Path:
    """Path of a rank's output."""
    return Path(output_dir, "ranks", f"rank{rank}.log")


def failure_of(error: BaseException, *, rank: int) -> RankFailure:
    """Describes `error`, raised in `rank` at this moment. A class with `shows_trace = False` ends a run as its user wants it."""
    message = str(error)
    shows_trace = getattr(error, "shows_trace", True)
    return RankFailure(
        rank=rank,
        kind=type(error).__name__,
        message=message,
        trace="".join(traceback.format_exception(error)) if shows_trace else "",
        time=time.time(),
        secondary=_is_secondary(error),
        host=platform.node() if len(set(hosts())) > 1 else "",
    )


def _is_secondary(error: BaseException) -> bool:
    if type(error).__name__ in _SECONDARY_TYPES:
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(text in str(error) for text in _SECONDARY_TEXTS)


def failure_of_exit(returncode: int, *, rank: int, noticed: float) -> RankFailure:
    """Describes a rank that ended without writing its error. noticed: seconds since 1970 when its end was detected."""
    if returncode < 0:
        name = signal.Signals(-returncode).name
        hints = {"SIGKILL": " (out of memory? see dmesg)", "SIGBUS": " (is /dev/shm full?)"}
        message = f"was killed by {name}{hints.get(name, '')}"
    elif returncode - 128 in ENDING:  # it has saved its step first
        message = f"was ended by {signal.Signals(returncode - 128).name}"
    else:
        message = f"ended with exit code {returncode}"
    # Communication libraries abort when they lose a peer.
    secondary = returncode == -signal.SIGABRT
    code = 128 - returncode if returncode < 0 else returncode
    return RankFailure(rank=rank, kind="", message=message, trace="", time=noticed, secondary=secondary, code=code)


def failure_text(failure: RankFailure) -> str:
    """Encodes a failure on one line."""
    return json.dumps(asdict(failure))


def failure_from(text: str) -> RankFailure:
    """Decodes the result of `failure_text`."""
    return RankFailure(**json.loads(text))


def earlier_cause(text: str, other: str) -> str:
    """Returns the one of two encoded failures that is the first cause."""
    return min(text, other, key=lambda each: (failure_from(each).secondary, failure_from(each).time, each))


def write_failure(failure: RankFailure, *, output_dir: str | os.PathLike) -> None:
    """Writes the error of a rank atomically. If the run folder takes no file, as on a full disk, writes it into the launcher's memory."""
    path, text = error_path(output_dir, rank=failure.rank), failure_text(failure)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text=text)  # the launcher may end this process as soon as it finds the file
    except OSError:
        with suppress(OSError), open(os.environ.get(FAILURES, os.devnull), "a", encoding="utf-8") as file:
            file.write(text + "\n")


def forget_failure(output_dir: str | os.PathLike, *, rank: int) -> None:
    """Removes the error file of an earlier start of the rank."""
    error_path(output_dir, rank=rank).unlink(missing_ok=True)
    memory_path(output_dir, rank=rank).unlink(missing_ok=True)


def read_failure(
    output_dir: str | os.PathLike, *, rank: int, memory: str | os.PathLike | None = None
) -> RankFailure | None:
    """The error that a rank has written, or None. memory: the file for errors that the run folder did not take."""
    try:
        return failure_from(error_path(output_dir, rank=rank).read_text(encoding="utf-8"))
    except FileNotFoundError:
        pass
    with suppress(OSError):
        lines = [] if memory is None else Path(memory).read_text(encoding="utf-8").splitlines()
        return next((RankFailure(**found) for found in map(json.loads, lines) if found["rank"] == rank), None)
    return None


def first_cause(failures: list[RankFailure]) -> RankFailure:
    """The earliest failure that is not just the loss of a peer; if all are, the earliest."""
    return min(failures, key=lambda failure: (failure.secondary, failure.time))
