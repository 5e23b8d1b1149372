"""A short run of `scripts/kill_checkpoints.py`: ranks killed at random moments around saves."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_kills_leave_a_complete_checkpoint(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "kill_checkpoints.py", "--runs", "6", "--folder", tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "6 kills" in done.stdout and "0 with faults" in done.stdout, (
        done.stdout + done.stderr
    )
