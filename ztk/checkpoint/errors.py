"""Errors of checkpoints, and their agreement across ranks."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ztk.core.policies.machine import place_of
from ztk.core.runtime import Comm, CommMismatch, PeerLost


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded. The message names the file, the fault and the usable checkpoints."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is truncated or corrupt. An older one may be complete."""


class SaveFailed(RuntimeError):
    """A checkpoint could not be written. The message names rank, file and cause; the previous checkpoint is unchanged.

    step: the step whose checkpoint is missing. It is None if only older checkpoints could not be removed.
    """

    step: int | None = None


_FIXES = {
    errno.ENOSPC: "free space on that disk, keep fewer checkpoints (checkpoint.keep), or save to another disk",
    errno.EDQUOT: "the disk quota is used up: raise it, or save to another disk",
    errno.EROFS: "the filesystem is read-only: save to another one",
    errno.EACCES: "the folder is not writable for this user: change its permissions, or save elsewhere",
    errno.ENOTDIR: "a part of the path is a file: save elsewhere",
    errno.EEXIST: "a part of the path is a file: save elsewhere",  # of a folder to make
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


@contextmanager
def agreed(comm: Comm, *, error: type[Exception]) -> Iterator[None]:
    """Runs the block on every rank and then compares the results. If any rank failed, all raise the same error.

    The error has the class of the failures if they share a subclass of `error`.
    """
    failure = None
    try:
        yield
    except (PeerLost, CommMismatch):
        raise  # a single rank has nothing to compare
    except Exception as raised:
        failure = raised
    own_kind = type(failure) if isinstance(failure, error) else error
    told = comm.gather_objects(None if failure is None else (own_kind, describe(failure)))
    failed = {rank: item for rank, item in enumerate(told) if item is not None}
    if failed:
        kinds = {kind for kind, _ in failed.values()}
        kind = kinds.pop() if len(kinds) == 1 else error
        texts = {rank: text for rank, (_, text) in failed.items()}
        raise kind(_joined(texts, world_size=comm.size)) from failure


def _joined(failed: dict[int, str], *, world_size: int) -> str:
    if len(set(failed.values())) == 1 and len(failed) == world_size:
        return next(iter(failed.values()))
    return "; ".join(f"{place_of(rank)}: {text}" for rank, text in failed.items())
