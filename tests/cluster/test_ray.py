"""`launch=ray` on a Ray that the command starts: `pytest tests/cluster/test_ray.py --slow`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.slurm import ROOT

pytest.importorskip("ray", reason="needs ray: pip install 'ztk[ray]'")
pytestmark = pytest.mark.slow
RUN = (
    *("model=nano", "data=synthetic", "data.seq_len=32", "precision=fp32", "logger=disabled", "launch.threads=1"),
    *("train.global_batch_size=8", "train.micro_batch_size=4", "zero=stage3", "launch.timeout_seconds=100"),
    *("checkpoint.every=10", "launch.device=cpu", "launch.ranks=2"),
)


def start(*words: str, folder: Path) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "run.py"), *RUN, *words, f"hydra.run.dir={folder}"]
    return subprocess.Popen(
        command, env=environment, cwd=folder.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(*words: str, folder: Path) -> tuple[int, str]:
    process = start(*words, folder=folder)
    output = process.communicate(timeout=300)[0]
    return process.returncode, output


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def wait_for_steps(folder: Path, *, steps: int) -> None:
    end, file = time.monotonic() + 150, folder / "metrics.jsonl"
    while not file.exists() or len(file.read_text().splitlines()) < steps:
        assert time.monotonic() < end
        time.sleep(0.1)


def rank_process(rank: int, *, folder: Path) -> int:
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            words, line = path.read_bytes().split(b"\0"), path.with_name("cmdline").read_bytes()
        except OSError:
            continue
        if f"RANK={rank}".encode() in words and f"{folder}/config.yaml".encode() in line:
            return int(path.parent.name)
    raise AssertionError(f"rank {rank} does not run")


def test_an_interrupted_run_has_the_losses_of_a_local_one(tmp_path):
    local, folder = tmp_path / "local", tmp_path / "ray"
    code, output = run("train.steps=400", folder=local)
    assert code == 0, output
    process = start("launch=ray", "train.steps=400", folder=folder)
    wait_for_steps(folder, steps=5)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 130, output
    assert "This continues the run" in output
    code, output = run("launch=ray", "train.steps=400", folder=folder)
    assert code == 0, output
    assert "continues after step" in output
    assert summary(folder)["loss_digest"] == summary(local)["loss_digest"]


def test_a_killed_rank_is_the_first_cause(tmp_path):
    folder = tmp_path / "run"
    process = start("launch=ray", "train.steps=1000000", folder=folder)
    wait_for_steps(folder, steps=5)
    os.kill(rank_process(1, folder=folder), signal.SIGKILL)
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 1, output
    assert "rank 1 was killed by SIGKILL" in output
    assert summary(folder)["status"] == "failed"


def test_a_run_without_ranks_is_refused(tmp_path):
    words = [word for word in RUN if word != "launch.ranks=2"]
    command = [sys.executable, str(ROOT / "run.py"), *words, "launch=ray"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "launch=ray: needs launch.ranks=N" in done.stderr
