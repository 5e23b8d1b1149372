"""python -m ztk.cli.child PARENT_PID OVERRIDES: the command `ztk`, ended by the system when the process that started it ends.

The parent cannot arrange that before the start: code between fork and exec may stop for ever in a process with threads.
"""

import ctypes
import os
import signal
import sys

from ztk.cli.command import main
from ztk.cli.session import Session

LINE_REFUSED = 3  # exit code of a refused command line; jobs that are all refused end with 2, as everywhere
_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """SIGTERM for this process when `parent` ends, at once if it has. The command then ends its ranks and says so in the run's record."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    sys.argv[0] = "ztk"  # in the record: the command that repeats this
    session = Session()
    code = main(session)
    sys.exit(LINE_REFUSED if session.is_refused else code)
