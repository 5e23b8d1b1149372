"""The generic tests must fail on a wrong kernel: mistakes are planted in copies of the source, which are then run."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("every", "count"), [(16, 6), pytest.param(1, 93, marks=pytest.mark.slow)])
def test_planted_mistakes_are_caught(every, count):
    """In a process of its own, which forks for each: a kernel that stores where it should not may end its process."""
    command = [sys.executable, "-m", "tests.kernels.plant_mistakes", "--every", str(every)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, "\n".join([*(line for line in lines if "urvives" in line), done.stderr[-3000:]])
    assert lines[-1] == f"{count} of {count} caught"
