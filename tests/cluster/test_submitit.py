"""`examples/cluster/submitit_run.py` under submitit's local executor and in a real Slurm: `pytest tests/cluster/test_submitit.py --slow`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.slurm import NODES, ROOT, Cluster, missing

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


def steps_in(folder: Path) -> int:
    rows = folder / "metrics.jsonl"
    return len(rows.read_text().splitlines()) if rows.exists() else 0


def test_two_nodes_with_two_tasks_each(tmp_path, monkeypatch):
    """One run of four ranks. SIGUSR2 saves and requeues it, and its digest is the one of four local ranks."""
    if reason := missing():
        pytest.skip(reason)
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "cluster"))
    monkeypatch.chdir(ROOT)
    from submitit_run import Run

    words = [word for word in RUN if not word.startswith(("launch.ranks=", "train.micro_batch_size="))]
    pause = ("callbacks.pause._target_=tests.cluster.pause.Pause", "callbacks.pause.seconds=0.1")
    words = [*words, "train.steps=100", "train.micro_batch_size=2", "checkpoint.every=1000", *pause]
    local, folder = tmp_path / "local", tmp_path / "run"
    command = [sys.executable, str(ROOT / "run.py"), *words, "launch.ranks=4", f"hydra.run.dir={local}"]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    with Cluster() as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'examples' / 'cluster'}")
        executor = submitit.AutoExecutor(folder=tmp_path / "jobs", cluster="slurm")
        executor.update_parameters(timeout_min=30, nodes=2, tasks_per_node=2, cpus_per_task=1, slurm_signal_delay_s=30)
        job = executor.submit(Run(*words, f"hydra.run.dir={folder}"))
        end = time.monotonic() + 200
        while steps_in(folder) < 10:
            assert time.monotonic() < end, cluster.state(job.job_id)
            time.sleep(0.1)
        assert json.loads((folder / "env.json").read_text())["hosts"] == [NODES[0]] * 2 + [NODES[1]] * 2
        cluster.run("scancel", "--signal=USR2", job.job_id)
        cluster.start_again(job.job_id)
        state = cluster.wait_for_end(job.job_id, seconds=200)
        text = "".join(path.read_text() for path in (tmp_path / "jobs").glob("*.out"))
        errors = "".join(path.read_text() for path in (tmp_path / "jobs").glob("*.err"))
    assert state == "COMPLETED", text + errors
    assert "continues after step" in text, text + errors
    found, expected = (json.loads((each / "summary.json").read_text()) for each in (folder, local))
    assert (found["world_size"], found["loss_digest"]) == (4, expected["loss_digest"])
    assert steps_in(folder) == 100
