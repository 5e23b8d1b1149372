"""python -m ztk.cli.child PARENT_PID OVERRIDES: the command `ztk`, which the system terminates when the parent process ends.

The child requests this itself, because code between fork and exec can deadlock in a process with threads.
"""

import ctypes
import os
import signal
import sys

from ztk.cli import main
from ztk.cli.session import Session

LINE_REFUSED = 3  # exit code of an invalid command line; if all jobs are refused, the code is 2, as everywhere
_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Requests SIGTERM for this process when `parent` ends, or exits if it has ended already.

    On SIGTERM the command stops its ranks and records the cause.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    sys.argv[0] = "ztk"  # recorded as the command that repeats the run
    session = Session()
    code = main(session)
    sys.exit(LINE_REFUSED if session.is_refused else code)
