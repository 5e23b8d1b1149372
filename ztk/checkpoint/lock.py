"""Allows one writer per folder of checkpoints.

A second run in the same folder would remove the first one's temporary folder during a save, and prune its checkpoints.
"""

import errno
import fcntl
import logging
import os
import time
import weakref
from pathlib import Path

from ztk.checkpoint.errors import SaveFailed

logger = logging.getLogger(__name__)

# The children of a killed process inherit the lock; a data loader's worker ends within 5 s after its parent.
PATIENCE_SECONDS = 7.0
_UNSUPPORTED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}


class WriterLock:
    """An advisory lock on the folder itself (flock(2)). It needs no lock file, and the system releases it with the process.

    Raises:
        SaveFailed: another run, or another `Saver` of this process, holds the lock.
        OSError: the folder cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._end = weakref.finalize(self, os.close, self._fd)  # if the `Saver` is dropped without `close`
        try:
            self._acquire(folder)
        except BaseException:
            self.release()
            raise

    def _acquire(self, folder: Path) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SaveFailed(
                        f"another run or engine is saving checkpoints into {folder}; give this one a folder of its own "
                        "(hydra.run.dir on the command line, save_dir or tag in a script), or end the other"
                    ) from None
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                logger.warning("%s: no file locks here (%s); see that one run alone saves into it", folder, error)
                return
            time.sleep(0.05)

    def release(self) -> None:
        """Releases the lock. Idempotent."""
        self._end()
