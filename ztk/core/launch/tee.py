"""The log of a rank that also has the terminal."""

import os
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

    def __init__(self, terminal: TextIO | LastingOutput, *, log: TextIO | LastingOutput) -> None:
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


def log_to(path: Path, *, appends: bool = False) -> LastingOutput:
    """From now on Python's output also goes to `path`. Returns the log, for text that the terminal should not show.

    appends: keeps the file's text.
    Neither the terminal nor the log ends the run if it fails, as on a full disk.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("a" if appends else "w", buffering=1, encoding="utf-8")
    except OSError:
        opened = open(os.devnull, "w", encoding="utf-8")
    log = LastingOutput(opened)
    sys.stderr = Tee(LastingOutput(sys.stderr), log=log)
    note = "ztk: standard output was closed ({}); the run goes on, and {} has its output\n"
    lasting = LastingOutput(sys.stdout, on_lost=lambda reason: sys.stderr.write(note.format(reason, path)))
    sys.stdout = Tee(lasting, log=log)
    return log


def keep_output() -> TextIO:
    """From now on an error of Python's output, as of a log on a full disk, ends nothing. Returns standard error."""
    sys.stdout, sys.stderr = LastingOutput(sys.stdout), LastingOutput(sys.stderr)
    return sys.stderr
