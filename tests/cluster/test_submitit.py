"""`examples/cluster/submitit_run.py` under submitit's local executor: `pytest tests/cluster/test_submitit.py --slow`."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.slurm import ROOT

submitit = pytest.importorskip("submitit", reason="needs submitit: pip install 'ztk[launchers]'")
pytestmark = pytest.mark.slow
RUN = (
    *("model=nano", "data=synthetic", "data.seq_len=32", "precision=fp32", "logger=disabled", "launch.threads=1"),
    *("train.global_batch_size=8", "train.micro_batch_size=4", "zero=stage3", "launch.device=cpu", "launch.ranks=2"),
)


def task_of(job) -> int:
    """The process in which submitit calls the run."""
    controller = job._process.pid
    children = Path(f"/proc/{controller}/task/{controller}/children").read_text().split()
    return next(
        int(child) for child in children if b"submitit.core._submit" in Path(f"/proc/{child}/cmdline").read_bytes()
    )


def test_a_preempted_run_continues_after_the_saved_step(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "cluster"))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'examples' / 'cluster'}")
    monkeypatch.chdir(ROOT)
    from submitit_run import Run

    folder, rows = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    executor = submitit.LocalExecutor(folder=tmp_path / "jobs")
    executor.update_parameters(timeout_min=30, signal_delay_s=30)
    job = executor.submit(Run(*RUN, "train.steps=1000", f"hydra.run.dir={folder}"))
    end = time.monotonic() + 150
    while not rows.exists() or len(rows.read_text().splitlines()) < 10:
        assert time.monotonic() < end, job.stderr()
        time.sleep(0.1)
    os.kill(task_of(job), signal.SIGUSR2)  # as Slurm does before a preemption
    job.result()
    assert "continues after step" in job.stdout()
    assert [json.loads(row)["step"] for row in rows.read_text().splitlines()] == list(range(1, 1001))
