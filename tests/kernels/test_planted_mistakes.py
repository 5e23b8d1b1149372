"""The generic tests must fail on a wrong kernel: mistakes are planted in copies of the source, which are then run."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_planted_mistake_is_caught():
    """In a process of its own, which forks for each: a kernel that stores where it should not may end its process."""
    command = [sys.executable, str(ROOT / "scripts" / "plant_mistakes.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, "\n".join([*(line for line in lines if "urvives" in line), done.stderr[-3000:]])
    assert lines[-1] == "82 of 82 caught"
