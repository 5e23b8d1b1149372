"""A short run of `scripts/kill_sweeps.py`: a sweep is killed at a random moment, continued, and compared with an undisturbed one."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # test_interrupted.py kills runs
def test_a_killed_sweep_ends_as_an_undisturbed_one(tmp_path):
    script = str(ROOT / "scripts" / "kill_sweeps.py")
    command = [sys.executable, script, "--kills", "1", "--jobs", "2", "--steps", "4", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 kills" in done.stdout and "equal digests" in done.stdout
