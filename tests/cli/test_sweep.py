"""Sweeps from the command line to the folders, with a task that only writes its rank; the last test trains."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.cli.test_run import CHECKOUT, FAKE, WAITING, environment
from tests.commands import run_command
from ztk.report.commit import read_commit

TRAINS = (
    *("-m", "model=nano", "data=synthetic", "data.seq_len=32", "train.steps=40", "train.micro_batch_size=1"),
    *("launch.ranks=1", "logger=disabled", "checkpoint.every=4", "checkpoint.keep=100", "zero=stage1"),
)


def run(*words: str, cwd: Path, plan: dict | None = None) -> subprocess.CompletedProcess[str]:
    return run_command(*words, cwd=cwd, environment={"FAKE_TASK": json.dumps(plan or {})})


def states(folder: Path) -> list[str]:
    jobs = json.loads((folder / "sweep.json").read_text())["jobs"]
    return [json.loads((folder / job["folder"] / "summary.json").read_text())["status"] for job in jobs]


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Path -> time and content of every file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_failed_jobs_start_again_and_finished_ones_stay(tmp_path):
    plan = {"rank": 1, "step": 0, "how": "raise", "stage": 1}
    line = (*FAKE, "-m", "zero=stage0,stage1", "train.steps=1", "launch.ranks=2", "hydra.sweep.dir=D")
    done = run(*line, cwd=tmp_path, plan=plan)
    folder = tmp_path / "D"
    assert done.returncode == 1 and states(folder) == ["done", "failed"]
    record = json.loads((folder / "sweep.json").read_text())
    assert [job["overrides"][1] for job in record["jobs"]] == ["zero=stage0", "zero=stage1"]
    assert record["grid"] == {"zero": ["stage0", "stage1"]} and record["commit"] == read_commit()
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == sorted(
        job["hash"] for job in record["jobs"]
    )
    first = folder / record["jobs"][0]["folder"]
    before = everything(first)

    listed = run("sweep.resume=D", "trust=true", "sweep.list=true", cwd=tmp_path)
    assert listed.returncode == 0 and "failed" in listed.stdout and "rank 0" not in listed.stdout
    refused = run(*line, cwd=tmp_path)
    assert refused.returncode == 2 and "sweep.resume=" in refused.stderr
    none = run("sweep.resume=D", "trust=true", "sweep.retries=0", cwd=tmp_path)
    assert none.returncode == 1 and "rank 0" not in none.stdout

    again = run("sweep.resume=D", "trust=true", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert states(folder) == ["done", "done"] and everything(first) == before
    assert "began at commit" not in again.stderr
    (folder / "sweep.json").write_text(json.dumps(record | {"commit": "another"}))
    complete = everything(folder)
    last = run("sweep.resume=D", "trust=true", cwd=tmp_path)
    assert last.returncode == 0
    assert (
        record["commit"] is None or f"began at commit another, this is {record['commit']}" in last.stderr
    )  # None: of an sdist
    assert everything(folder) == complete


def test_a_list_starts_nothing_and_leaves_nothing(tmp_path):
    line = ("-m", "model=nano", "zero=stage0,ddp", "offload=cpu", "sweep.repeats=3", "sweep.list=true")
    done = run(*line, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pending") == 6 and list(tmp_path.iterdir()) == []


def test_retries_of_a_job_are_counted(tmp_path):
    plan = {"rank": 0, "step": 0, "how": "raise"}
    line = (*FAKE, "-m", "launch.ranks=1", "train.steps=1", "sweep.retries=2", "hydra.sweep.dir=D")
    done = run(*line, cwd=tmp_path, plan=plan)
    assert done.returncode == 1 and done.stdout.count("rank 0 of 1") == 3


def test_repeats_are_interleaved_and_two_commands_exclude_each_other(tmp_path):
    line = (
        *FAKE,
        "-m",
        "zero=stage0,stage1",
        "launch.ranks=1",
        "sweep.repeats=2",
        "sweep.repeat_with=same_seed",
        "hydra.sweep.dir=D",
    )
    command = [sys.executable, str(CHECKOUT / "run.py"), *line, "train.steps=2"]
    hangs = environment({"rank": 0, "step": 1, "how": "hang"})
    with subprocess.Popen(command, cwd=tmp_path, env=hangs, stdout=subprocess.DEVNULL) as sweep:
        wait_for(lambda: list(tmp_path.glob("D/*/pid0")))
        other = run("sweep.resume=D", "trust=true", cwd=tmp_path)
        assert other.returncode == 2 and "another command runs this sweep" in other.stderr
        listed = run("sweep.resume=D", "trust=true", "sweep.list=true", cwd=tmp_path)
        assert "running" in listed.stdout and listed.stdout.count("pending") == 3
        sweep.send_signal(signal.SIGKILL)
    listed = run("sweep.resume=D", "trust=true", "sweep.list=true", cwd=tmp_path)
    assert "dead" in listed.stdout and listed.stdout.count("pending") == 3
    again = run("sweep.resume=D", "trust=true", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    jobs = json.loads((tmp_path / "D" / "sweep.json").read_text())["jobs"]
    assert [(job["overrides"][1], job["repeat"]) for job in jobs] == [
        ("zero=stage0", 0),
        ("zero=stage1", 0),
        ("zero=stage0", 1),
        ("zero=stage1", 1),
    ]
    assert [job["folder"] for job in jobs] == [
        *(job["hash"] for job in jobs[:2]),
        *(f"{job['hash']}-1" for job in jobs[2:]),
    ]
    began = [(tmp_path / "D" / job["folder"] / "pid0").stat().st_mtime for job in jobs]
    assert began == sorted(began)


def test_a_launcher_in_processes_hides_no_failure(tmp_path, monkeypatch):
    plugins = CHECKOUT / "tests" / "tasks" / "launchers"
    plan = {"rank": 0, "step": 0, "how": "raise", "stage": 1}
    line = (*FAKE, "-m", "zero=stage1,ddp", "offload=cpu", "launch.ranks=1", "train.steps=1", "hydra/launcher=forking")
    command = [sys.executable, str(CHECKOUT / "run.py"), *line, "hydra.sweep.dir=D"]
    known = environment(plan) | {"PYTHONPATH": f"{CHECKOUT}{os.pathsep}{plugins}"}
    done = subprocess.run(
        command, cwd=tmp_path, env=known, capture_output=True, text=True, timeout=WAITING, check=False
    )
    assert done.returncode == 1, done.stderr
    assert states(tmp_path / "D") == ["failed", "refused"]
    assert "2 jobs" in done.stdout and "rank 0: ValueError: boom" in done.stdout and "has no offload" in done.stdout


def test_a_killed_job_goes_on_from_its_checkpoint_to_the_same_bits(tmp_path):
    command = [sys.executable, str(CHECKOUT / "run.py"), *TRAINS, "hydra.sweep.dir=killed"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(CHECKOUT)}, stdout=subprocess.DEVNULL
    ) as sweep:
        wait_for(lambda: list(tmp_path.glob("killed/*/checkpoints/step-000004/manifest.json")))
        sweep.send_signal(signal.SIGKILL)
    resumed = run("sweep.resume=killed", "trust=true", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "continues after step" in resumed.stdout
    straight = run(*TRAINS, "hydra.sweep.dir=straight", cwd=tmp_path)
    assert straight.returncode == 0, straight.stderr
    found, expected = (next(tmp_path.glob(f"{name}/*/summary.json")) for name in ("killed", "straight"))
    assert json.loads(found.read_text())["loss_digest"] == json.loads(expected.read_text())["loss_digest"]
    rows = [json.loads(row)["step"] for row in (found.parent / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(1, 41))
    assert found.parent.name == expected.parent.name


def wait_for(happened) -> None:
    end = time.monotonic() + WAITING
    while not happened():
        assert time.monotonic() < end, "the job did not start"
        time.sleep(0.02)
