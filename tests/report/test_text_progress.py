"""How far a text is tokenised, on a terminal and elsewhere."""

import io
import sys

from ztk.report import text_progress
from ztk.report.text_progress import shown_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_where_there_is_no_terminal(monkeypatch):
    said = []
    with shown_progress(say=said.append) as show:
        show(10, 1_000_000, 0.1)  # the first seconds are silent
        monkeypatch.setattr(text_progress, "SECONDS", -1.0)
        show(2_000, 30_000_000, 0.305)
    assert said == ["tokenises: 2,000 documents, 30 MB, 30%"]


def test_a_bar_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with shown_progress(say=None) as show:
        show(2_000, 30_000_000, 0.305)
    assert "2,000 documents, 30 MB" in terminal.getvalue() and "30%" in terminal.getvalue()
