"""The part of a terminal's output that reaches the log."""

import io

from ztk.core.launch.tee import Tee


def test_permanent_lines_are_logged_without_colours_and_frames():
    terminal, log = io.StringIO(), io.StringIO()
    tee = Tee(terminal, log=log)
    text = "\x1b[1mhello\x1b[0m\n" + "10 %\r20 %\r" + "done\n" + "\x1b[2Kframe\n" + "\n" + "unfinished"
    assert tee.write(text) == len(text)
    assert terminal.getvalue() == text
    assert log.getvalue() == "hello\ndone\n"
    assert not tee.isatty()
