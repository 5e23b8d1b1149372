"""`launch.debug=RANK`: one rank has the terminal, for `breakpoint()`; the others write to files."""

import os
import pty
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from ztk.cli.sweep_line import read_line
from ztk.config import compose

CHECKOUT = Path(__file__).parents[2]
_TASK = """
    import os
    from pathlib import Path

    def main(config):
        value, rank = 41, os.environ["RANK"]
        print(f"rank {rank} is here")
        if rank == "1" or config.launch.ranks == 1:
            breakpoint()
        Path(config.output_dir, f"value{rank}").write_text(f"{value} {config.launch.timeout_seconds}")
"""


def command(folder: Path, *words: str) -> list[str]:
    (folder / "stopping.py").write_text(textwrap.dedent(_TASK))
    run = [sys.executable, str(CHECKOUT / "run.py"), "task._target_=stopping.main", "model=nano", "data=synthetic"]
    return [*run, "logger=disabled", f"hydra.run.dir={folder / 'run'}", *words]


def test_a_rank_is_debugged_at_a_terminal(tmp_path):
    """In a session of its own whose terminal is `slave`, as a shell's: the rank reads it from the foreground."""
    master, slave = pty.openpty()
    line = command(tmp_path, "launch.ranks=2", "launch.debug=1")
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *line], cwd=tmp_path, stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    shown, answers = "", [b"value = 43\n", b"p value * 2\n", b"continue\n"]
    end = threading.Timer(120, process.kill)  # a rank in the background would be stopped, and wait
    end.start()
    while True:
        try:
            shown += os.read(master, 4096).decode()
        except OSError:  # all ends of the terminal are closed
            break
        if shown.count("(Pdb) ") > 3 - len(answers) and answers:
            os.write(master, answers.pop(0))
    end.cancel()
    os.close(master)
    assert process.wait() == 0, shown
    assert "rank 1 is here" in shown and "rank 0 is here" not in shown and "\n86" in shown
    assert (tmp_path / "run" / "value1").read_text().startswith("43 31536000")
    assert "rank 0 is here" in (tmp_path / "run" / "ranks" / "rank0.log").read_text()


def test_a_debugger_reads_a_pipe_and_without_one_names_its_key(tmp_path):
    one = command(tmp_path, "launch.ranks=1")
    done = subprocess.run(
        [*one, "launch.debug=0"], cwd=tmp_path, input="p value + 1\nq\n", capture_output=True, text=True
    )
    assert "(Pdb) 42" in done.stdout and done.returncode == 1 and "the debugger was quit" in done.stderr
    without = subprocess.run(one, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert without.returncode == 1
    assert "breakpoint(): this rank has no terminal; start the run with launch.debug=0" in without.stderr


@pytest.mark.parametrize(
    "words, fault",
    [
        (
            ("launch.ranks=2", "launch.debug=2"),
            "launch.debug=2: the run has 2 ranks, counted from 0; use launch.debug=1",
        ),
        (("launch.debug=0", "launch.timeout_seconds=9"), "launch.debug has no time limit"),
        (("launch.debug=0", "launch.elastic=true", "checkpoint=periodic"), "starts ranks again"),
    ],
)
def test_debugging_refuses(words, fault, tmp_path):
    with pytest.raises(ValueError, match=fault):
        compose(*words, output_dir=tmp_path)


def test_a_sweep_is_not_debugged():
    with pytest.raises(ValueError, match="launch.debug=0: is for one run at a terminal"):
        read_line(["launch.debug=0", "zero=stage0,stage1"], flags=["-m"])
