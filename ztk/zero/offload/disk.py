"""One offload file: opened past the page cache, without a name from the start, read and written in full."""

import errno
import os
import weakref
from pathlib import Path

from torch import Tensor

from ztk.core.policies.offload import PAGE_BYTES
from ztk.core.runtime.host_memory import view_bytes

# [Note: Unlinked offload files]
# The file is unlinked right after it is opened; the open descriptor keeps it usable. However the process ends (killed,
# out of memory, power cut), the kernel then gives the space back, and no run can leave gigabytes on the disk. The price:
# `ls` and `du` do not see the file (`df` and /proc/PID/fd do), and nothing in it outlives the process. Therefore
# completing a write needs no fsync either: the file cannot be read after a crash.

_FIXES = {
    errno.ENOSPC: "free space on that disk, or set offload.nvme_path to a folder on a larger one",
    errno.EDQUOT: "the disk quota is used up: raise it, or set offload.nvme_path to a folder on another disk",
    errno.EIO: "the device failed (see the kernel log: dmesg); set offload.nvme_path to a folder on another disk",
    errno.EROFS: "the filesystem has become read-only (see dmesg); set offload.nvme_path to a folder on another disk",
    errno.EINVAL: "the filesystem refuses direct I/O; set offload.nvme_path to another disk or offload.direct_io=false",
}


class DiskError(OSError):
    """A read or write of an offload file failed; the text names file, offset, cause and fix."""


class DiskFile:
    """An open offload file of this process.

    `read` and `write` move entire buffers and release the interpreter lock meanwhile, so any number of threads may call
    them. Subclasses may override `read_some` and `write_some`, the system calls.
    """

    def __init__(self, path: Path, *, direct: bool) -> None:
        """Creates `path` (which must not exist) and unlinks it. direct: bypasses the page cache (O_DIRECT). Raises OSError."""
        self._hold(path, flags=os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, direct=direct)
        os.unlink(path)  # See [Note: Unlinked offload files]

    def _hold(self, path: Path, *, flags: int, direct: bool) -> None:
        self.path = path
        self.direct = direct
        self._fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)
        self._close = weakref.finalize(self, os.close, self._fd)
        # pyrefly: ignore[missing-attribute]  # a property, which typeshed leaves out of __slots__
        self._close.atexit = False  # a thread may still be writing then

    @classmethod
    def existing(cls, path: Path, *, direct: bool) -> "DiskFile":
        """Opens an existing file for reading; it keeps its name. Raises OSError."""
        found = cls.__new__(cls)
        found._hold(path, flags=os.O_RDONLY | os.O_CLOEXEC, direct=direct)
        return found

    def preallocate(self, *, offset: int, nbytes: int) -> None:
        """Reserves `nbytes` at `offset` (both in bytes), which read as zeros. Raises OSError (ENOSPC) if the disk is too small."""
        os.posix_fallocate(self._fd, offset, nbytes)

    def read(self, memory: Tensor, *, offset: int) -> None:
        """Fills `memory` (uint8 [n], CPU; page-aligned for direct I/O) from `offset`, in bytes. Raises DiskError."""
        self._move(memory, offset=offset, some=self.read_some, action="reading")

    def write(self, memory: Tensor, *, offset: int) -> None:
        """Writes all of `memory` (uint8 [n], CPU; page-aligned for direct I/O) at `offset`, in bytes. Raises DiskError."""
        self._move(memory, offset=offset, some=self.write_some, action="writing")

    def read_some(self, buffer: memoryview, *, offset: int) -> int:
        """One system call. Returns the bytes read, which may be fewer than requested."""
        return os.preadv(self._fd, [buffer], offset)

    def write_some(self, buffer: memoryview, *, offset: int) -> int:
        """One system call. Returns the bytes written, which may be fewer than requested."""
        return os.pwritev(self._fd, [buffer], offset)

    def sync(self) -> None:
        """Writes the page cache to the device, so that its errors are raised here. Direct writes are on the device already. Raises
        DiskError."""
        if not self.direct:
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                raise self._error("syncing", nbytes=0, offset=0, cause=error) from error

    def close(self) -> None:
        """Frees the space. Idempotent; also called when the object is garbage-collected."""
        self._close()

    def _move(self, memory: Tensor, *, offset: int, some, action: str) -> None:
        nbytes = memory.numel()
        buffer = view_bytes(memory)
        done = 0
        while done < nbytes:
            try:
                moved = some(buffer[done:], offset=offset + done)
            except OSError as error:
                raise self._error(action, nbytes=nbytes - done, offset=offset + done, cause=error) from error
            # A call cut short in the middle of a page is repeated from the page's start: direct I/O must stay aligned.
            complete = moved - moved % PAGE_BYTES if self.direct and done + moved < nbytes else moved
            if complete == 0:
                cause = OSError(errno.ENODATA, f"the call moved {moved} bytes; the file was truncated or is damaged")
                raise self._error(action, nbytes=nbytes - done, offset=offset + done, cause=cause)
            done += complete

    def _error(self, action: str, *, nbytes: int, offset: int, cause: OSError) -> DiskError:
        # pyrefly: ignore[no-matching-overload]  # get(None) is the default
        fix = _FIXES.get(cause.errno, "check that disk, or set offload.nvme_path to a folder on another one")
        # pyrefly: ignore[no-matching-overload]  # get(None) is the default
        name = errno.errorcode.get(cause.errno, "unknown error")
        text = f"{action} {nbytes} bytes at offset {offset} of {self.path} failed: {cause.strerror} ({name}); {fix}"
        return DiskError(cause.errno, text)
