"""Errors of checkpoints, and their agreement across ranks."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ztk.core.runtime import Comm, CommMismatch, PeerLost


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded. The message names the file, the fault and the usable checkpoints."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is truncated or corrupt. An older one may be complete."""


class SaveFailed(RuntimeError):
    """A checkpoint could not be written. The message names rank, file and cause; the previous checkpoint is unchanged."""


_FIXES = {
    errno.ENOSPC: "free space on that disk, keep fewer checkpoints (checkpoint.keep), or save to another disk",
    errno.EDQUOT: "the disk quota is used up: raise it, or save to another disk",
    errno.EROFS: "the filesystem is read-only: save to another one",
    errno.EACCES: "the folder is not writable for this user: change its permissions, or save elsewhere",
    errno.ENOTDIR: "a part of the path is a file: save elsewhere",
    errno.EIO: "the device failed (see the kernel log: dmesg): save to another disk",
}


def describe(error: BaseException) -> str:
    """Formats an error with its fix, as part of a sentence."""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        # pyrefly: ignore[no-matching-overload]  # get(None) is the default
        fix = _FIXES.get(error.errno, "check that disk, or save to another one")
        return f"{where}{error.strerror or error}; {fix}"
    if isinstance(error, (CheckpointError, SaveFailed)):
        return str(error)
    return f"{type(error).__name__}: {error}"


class Agreement:
    """Turns a failure on one rank into the same failure on all: `with agreement.step("write"): ...`, on every rank."""

    def __init__(self, comm: Comm, *, error: type[Exception]) -> None:
        self._comm, self._error = comm, error

    @contextmanager
    def step(self) -> Iterator[None]:
        """Runs the block and then compares the results of all ranks. If any rank failed, all raise the same error.

        The error has the class of the failures if they share a subclass of `error`.
        """
        failure = None
        try:
            yield
        except (PeerLost, CommMismatch):
            raise  # a single rank has nothing to compare
        except Exception as error:
            failure = error
        own_kind = type(failure) if isinstance(failure, self._error) else self._error
        told = self._comm.gather_objects(None if failure is None else (own_kind, describe(failure)))
        failed = {rank: item for rank, item in enumerate(told) if item is not None}
        if failed:
            kinds = {kind for kind, _ in failed.values()}
            kind = kinds.pop() if len(kinds) == 1 else self._error
            texts = {rank: text for rank, (_, text) in failed.items()}
            raise kind(_joined(texts, world_size=self._comm.size)) from failure


def _joined(failed: dict[int, str], *, world_size: int) -> str:
    if len(set(failed.values())) == 1 and len(failed) == world_size:
        return next(iter(failed.values()))
    return "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
