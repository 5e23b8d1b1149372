"""Checks at start that a folder can hold offload files, instead of failing with EINVAL in the middle of a run."""

import errno
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from ztk.core.policies.offload import PAGE_BYTES
from ztk.zero.offload.disk import DiskFile
from ztk.zero.offload.pool import AlignedRegion

_IN_MEMORY = ("tmpfs", "ramfs")  # Linux accepts O_DIRECT on tmpfs since 6.6, but the bytes never leave main memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Filesystem:
    """The filesystem under a folder. `kind` is "" if the kernel does not report it (btrfs)."""

    kind: str
    free_bytes: int


def filesystem_of(path: Path) -> Filesystem:
    """Type and free space of the filesystem that holds the existing `path`."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kinds[left.split()[2]] = right.split()[0]
    return Filesystem(kind=kinds.get(number, ""), free_bytes=shutil.disk_usage(path).free)


def probe_folder(path: str | Path, *, direct: bool) -> Filesystem:
    """Creates the folder if it is missing, and writes, reads back and removes one page there as an offload file would.

    Raises ValueError naming offload.nvme_path and the fix if the folder cannot be made, is not a folder, is not
    writable, lies in main memory, or its filesystem lacks direct I/O (`direct`) or preallocation.
    """
    folder = Path(path)
    _make_folder(folder)
    filesystem = filesystem_of(folder)
    if direct and filesystem.kind in _IN_MEMORY:
        raise _refusal(
            folder,
            f"lies on {filesystem.kind}, which is main memory: nothing would be offloaded",
            "choose a folder on a disk, or offload to cpu",
        )
    disk = _open(folder, direct=direct)
    try:
        _round_trip(disk, folder=folder)
    finally:
        disk.close()
    return filesystem


def check_disk(path: Path, *, direct: bool) -> None:
    """Raises ValueError if the existing `path` is in main memory (tmpfs), where streaming from it would save nothing."""
    kind = filesystem_of(path).kind
    if direct and kind in _IN_MEMORY:
        raise ValueError(
            f"{path} lies on {kind}, which is main memory: reading from it saves none; put it on a disk, or leave offload out"
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if folder.exists() and not folder.is_dir():
            raise _refusal(folder, "is a file, not a folder", "name a folder") from error
        raise _refusal(folder, f"cannot be created ({error.strerror})", "choose a folder you may write to") from error


def _open(folder: Path, *, direct: bool) -> DiskFile:
    try:
        return DiskFile(folder / f"ztk-probe-{uuid.uuid4().hex}", direct=direct)
    except OSError as error:
        if error.errno == errno.EINVAL and direct:
            raise _no_direct(folder) from error
        reason = f"cannot hold a new file ({error.strerror})"
        if error.errno == errno.EROFS:
            reason = "lies on a read-only filesystem"
        elif error.errno in (errno.EACCES, errno.EPERM):
            reason = "is not writable by this user"
        raise _refusal(folder, reason, "choose a folder you may write to") from error


def _round_trip(disk: DiskFile, *, folder: Path) -> None:
    page = AlignedRegion(nbytes=PAGE_BYTES, pin=False).bytes
    page.fill_(165)
    try:
        disk.preallocate(offset=0, nbytes=PAGE_BYTES)
        disk.write(page, offset=0)
        page.zero_()
        disk.read(page, offset=0)
    except OSError as error:
        if error.errno == errno.EINVAL and disk.direct:
            raise _no_direct(folder) from error
        if error.errno == errno.EOPNOTSUPP:
            fix = "choose a folder on a local disk (ext4, xfs, btrfs)"
            raise _refusal(folder, "lies on a filesystem that cannot reserve space (posix_fallocate)", fix) from error
        fix = "choose a folder on a working disk with free space"
        raise _refusal(folder, f"failed a trial write ({error.strerror})", fix) from error
    if not bool((page == 165).all()):
        raise _refusal(folder, "returned other bytes than were written", "choose a folder on a working disk")


def _no_direct(folder: Path) -> ValueError:
    kind = filesystem_of(folder).kind or "filesystem of unknown type"
    return _refusal(
        folder,
        f"lies on a {kind} without direct I/O (O_DIRECT)",
        "choose a folder on a local disk (ext4, xfs, btrfs), or accept page-cache I/O with offload.direct_io=false",
    )


def _refusal(folder: Path, reason: str, fix: str) -> ValueError:
    return ValueError(f"offload.nvme_path={folder} {reason}; {fix}")
