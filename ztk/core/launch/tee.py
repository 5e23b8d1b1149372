"""The log of a rank that also has the terminal."""

import re
import sys
from pathlib import Path
from typing import TextIO

from ztk.core.launch.output import LastingOutput

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Tee:
    """Writes the text unchanged to the terminal, and to a log without colours and without the frames of a progress bar.

    A frame that is redrawn ends without a newline or moves the cursor; only permanent lines are logged.
    """

    def __init__(self, terminal: TextIO, *, log: TextIO) -> None:
        self._terminal = terminal
        self._log = log
        self._line = ""

    def write(self, text: str) -> int:
        self._terminal.write(text)
        *lines, rest = (self._line + text).split("\n")
        for line in lines:
            self._keep(line)
        self._line = rest.rpartition("\r")[2]
        return len(text)

    def _keep(self, line: str) -> None:
        redrawn = "\x1b[2K" in line or "\x1b[1A" in line
        shown = _CONTROL.sub("", line.rstrip("\r").rpartition("\r")[2])
        if shown.strip() and not redrawn:
            self._log.write(shown + "\n")

    def __getattr__(self, name: str) -> object:
        return getattr(self._terminal, name)  # isatty, fileno, encoding, flush ...


def log_to(path: Path) -> TextIO:
    """From now on Python's output also goes to `path`. Returns the log, for text that the terminal should not show."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("w", buffering=1, encoding="utf-8")
    sys.stderr = Tee(LastingOutput(sys.stderr), log=log)
    note = f"ztk: standard output was closed; the run goes on, and {path} has its output\n"
    sys.stdout = Tee(LastingOutput(sys.stdout, on_closed=lambda: sys.stderr.write(note)), log=log)
    return log
