"""A disk that becomes full while a run trains."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.commands import run_command

TINY = ("model=nano", "train.micro_batch_size=1", "data.seq_len=32", "launch.threads=1", "logger=disabled")
LINE = (*TINY, "train.quick=true", "train.steps=3", "hydra.run.dir=run")
STATE_BYTES = 2_750_000  # of a checkpoint


@pytest.fixture
def small_disk(tmp_path):
    """`small_disk(megabytes)` mounts the folder `run` and returns it."""
    folder, mounted = tmp_path / "run", []

    def mount(megabytes: float) -> Path:
        folder.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={int(megabytes * 1024)}k", "none", str(folder)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"this system mounts nothing here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_last_save_without_room_fails_with_its_cause_once(small_disk, tmp_path, ranks):
    folder = small_disk(1)
    done = run_command(*LINE, f"launch.ranks={ranks}", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("No space left on device") == ranks and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("SaveFailed: the checkpoint of step 3 was not saved") == 1
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"


def test_a_save_without_room_does_not_end_the_run(small_disk, tmp_path):
    """One checkpoint fits. The failures of steps 2 and 3 are reported, and only the last one's failure is the run's."""
    folder = small_disk(1.5 * STATE_BYTES / 2**20)
    done = run_command(*LINE, "launch.ranks=1", "checkpoint.every=1", cwd=tmp_path)
    assert done.returncode == 1
    assert "the run goes on: the checkpoint of step 2 was not saved" in done.stdout, done.stdout
    assert "SaveFailed: the checkpoint of step 3 was not saved" in done.stderr
    assert [path.name for path in folder.glob("checkpoints/step-*")] == ["step-000001"]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3
