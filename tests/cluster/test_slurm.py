"""`launch=slurm` on a real Slurm of two nodes: `pytest tests/cluster --slow`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import NODES, ROOT, Cluster, missing

pytestmark = pytest.mark.slow
RUN = (
    *("model=nano", "data=synthetic", "data.seq_len=32", "precision=fp32", "logger=disabled", "launch.threads=1"),
    *("train.global_batch_size=8", "train.micro_batch_size=2", "zero=stage1", "launch.timeout_seconds=100"),
    *("checkpoint.every=10", "launch.device=cpu"),
)
STEPS = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(reason)
    with Cluster() as started:
        yield started


@pytest.fixture(scope="module")
def digest(tmp_path_factory) -> str:
    """Of the run without Slurm, on two local ranks."""
    folder = tmp_path_factory.mktemp("local")
    words = [*RUN, f"train.steps={STEPS}", "launch.ranks=2", f"hydra.run.dir={folder}"]
    subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
    )
    return summary(folder)["loss_digest"]


def pause(seconds: float, *, place: Path) -> list[str]:
    """Words of a run that waits after every step, so that a test's signal finds it. place: the command's current folder."""
    shutil.copy(Path(__file__).with_name("pause.py"), place / "pause.py")
    return ["callbacks.pause._target_=pause.Pause", f"callbacks.pause.seconds={seconds}"]


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def steps_in(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def wait_for_steps(folder: Path, *, steps: int, job: str, cluster: Cluster) -> None:
    end = time.monotonic() + 120
    while steps_in(folder) < steps:
        assert time.monotonic() < end, f"{cluster.state(job)}: {log_of(folder)}"
        time.sleep(0.1)


def log_of(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("slurm-*.log"))[-4000:]


def check_rows(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))


@pytest.mark.parametrize(("nodes", "each"), [(2, 1), (1, 2)])
def test_a_job_has_the_losses_of_a_local_run(nodes, each, cluster, digest, tmp_path):
    folder = tmp_path / "run"
    words = (f"launch.nodes={nodes}", f"launch.ranks_per_node={each}", f"train.steps={STEPS}")
    job = cluster.submit(*RUN, *words, f"hydra.run.dir={folder}", cwd=tmp_path)
    assert cluster.wait_for_end(job, seconds=300) == "COMPLETED", log_of(folder)
    assert summary(folder)["status"] == "done"
    assert summary(folder)["loss_digest"] == digest
    assert summary(folder)["world_size"] == 2
    hosts = json.loads((folder / "env.json").read_text())["hosts"]
    assert hosts == (list(NODES) if nodes == 2 else [hosts[0]] * 2)


def test_a_preempted_job_saves_and_goes_on_by_itself(cluster, digest, tmp_path):
    folder = tmp_path / "run"
    words = (f"train.steps={STEPS}", "launch.nodes=2", f"hydra.run.dir={folder}")
    job = cluster.submit(*RUN, *pause(0.4, place=tmp_path), *words, cwd=tmp_path)
    wait_for_steps(folder, steps=15, job=job, cluster=cluster)
    other = ("-p", "high", "--nodes=2", "--exclusive", "--output=/dev/null", "--parsable", "--wrap", "sleep 2")
    urgent = cluster.run("sbatch", *other).stdout.strip()
    assert cluster.wait_for_end(urgent, seconds=100) == "COMPLETED"
    saved = steps_in(folder)
    assert 15 <= saved < STEPS
    cluster.start_again(job)
    assert cluster.wait_for_end(job, seconds=300) == "COMPLETED", log_of(folder)
    assert cluster.restarts(job) == 1
    assert f"continues after step {saved}" in log_of(folder)  # no step is lost
    check_rows(folder)
    assert summary(folder)["loss_digest"] == digest


def test_before_its_time_limit_a_job_saves_and_goes_on_by_itself(cluster, digest, tmp_path):
    folder = tmp_path / "run"
    words = ("launch.nodes=2", "launch.time=2", "launch.signal_seconds=60", f"hydra.run.dir={folder}")
    job = cluster.submit(*RUN, *pause(1.5, place=tmp_path), f"train.steps={STEPS}", *words, cwd=tmp_path)
    while (state := cluster.wait_for_end(job, seconds=200)) != "COMPLETED":
        assert state == "PENDING", log_of(folder) + cluster.log.read_text()[-2000:]
        cluster.start_again(job)
    assert cluster.restarts(job) >= 1
    check_rows(folder)
    assert summary(folder)["loss_digest"] == digest


def test_a_failed_job_is_not_requeued(cluster, tmp_path):
    folder = tmp_path / "run"
    job = cluster.submit(
        *RUN,
        *pause(0.1, place=tmp_path),
        "train.steps=100000",
        "launch.nodes=2",
        f"hydra.run.dir={folder}",
        cwd=tmp_path,
    )
    wait_for_steps(folder, steps=5, job=job, cluster=cluster)
    os.kill(rank_process(1), signal.SIGKILL)
    assert cluster.wait_for_end(job, seconds=100) == "FAILED", log_of(folder)
    assert cluster.restarts(job) == 0
    assert summary(folder)["status"] == "failed"


def test_a_cancelled_job_is_not_requeued(cluster, tmp_path):
    folder = tmp_path / "run"
    job = cluster.submit(
        *RUN,
        *pause(0.1, place=tmp_path),
        "train.steps=100000",
        "launch.nodes=2",
        f"hydra.run.dir={folder}",
        cwd=tmp_path,
    )
    wait_for_steps(folder, steps=5, job=job, cluster=cluster)
    cluster.run("scancel", job)
    assert cluster.wait_for_end(job, seconds=100) == "CANCELLED", log_of(folder)
    assert list((folder / "checkpoints").glob("step-*")), log_of(folder)


def test_a_folder_has_one_job(cluster, tmp_path):
    folder = tmp_path / "run"
    words = (*RUN, *pause(0.1, place=tmp_path), "train.steps=100000", "launch.nodes=2", f"hydra.run.dir={folder}")
    job = cluster.submit(*words, cwd=tmp_path)
    wait_for_steps(folder, steps=5, job=job, cluster=cluster)
    again = cluster.run(sys.executable, str(ROOT / "run.py"), "launch=slurm", *words, cwd=tmp_path)
    assert again.returncode == 2, again.stderr
    script = cluster.run("sbatch", "--parsable", str(folder / "job.sbatch"), cwd=tmp_path).stdout.strip()
    assert cluster.wait_for_end(script, seconds=100) == "FAILED", log_of(folder)  # refused by the owner of the folder
    assert "writes into this folder" in log_of(folder)
    before = steps_in(folder)
    wait_for_steps(folder, steps=before + 5, job=job, cluster=cluster)
    cluster.run("scancel", job)


def sweep(*words: str, folder: Path, cluster: Cluster, place: Path) -> list[str]:
    """Submits two points and returns their jobs, which are in one array."""
    line = ("-m", "zero=stage1,stage3", "sweep.launcher=slurm", *words, f"hydra.sweep.dir={folder}")
    own = [word for word in RUN if word not in ("zero=stage1", "train.micro_batch_size=2")]
    own.append("train.micro_batch_size=4")  # with several micro-batches the stages add in other orders
    started = cluster.run(sys.executable, str(ROOT / "run.py"), *line, *own, cwd=place)
    assert started.returncode == 0, started.stderr
    jobs = [json.loads((point / "slurm.json").read_text())["job"] for point in points_of(folder)]
    number = jobs[0].partition("_")[0]
    assert jobs == [f"{number}_0", f"{number}_1"]
    assert f"submitted job {number}, an array of 2 runs" in started.stderr
    return jobs


def points_of(folder: Path) -> list[Path]:
    return [folder / job["folder"] for job in json.loads((folder / "sweep.json").read_text())["jobs"]]


def resume(folder: Path, *, cluster: Cluster, place: Path) -> str:
    command = (sys.executable, str(ROOT / "run.py"), f"sweep.resume={folder}", "trust=true")
    return cluster.run(*command, cwd=place).stderr


def test_points_of_a_sweep_are_an_array(cluster, tmp_path):
    folder = tmp_path / "sweep"
    jobs = sweep("launch.nodes=2", "train.steps=20", folder=folder, cluster=cluster, place=tmp_path)
    assert [cluster.wait_for_end(job, seconds=200) for job in jobs] == ["COMPLETED"] * 2, log_of(folder)
    assert len({summary(point)["loss_digest"] for point in points_of(folder)}) == 1
    assert "submitted" not in resume(folder, cluster=cluster, place=tmp_path)


def test_a_job_of_an_array_requeues_itself_alone(cluster, tmp_path):
    """Two points, one at a time. The first one gets the signal of its time limit and goes into the queue again; the second one is cancelled,
    and `sweep.resume` submits it alone.
    """
    folder = tmp_path / "sweep"
    words = ("launch.ranks_per_node=2", f"train.steps={STEPS}", "sweep.parallel=1", *pause(0.1, place=tmp_path))
    jobs = sweep(*words, folder=folder, cluster=cluster, place=tmp_path)
    first, second = points_of(folder)
    wait_for_steps(first, steps=5, job=jobs[0], cluster=cluster)
    assert cluster.state(jobs[1]) == "PENDING"
    cluster.run("scancel", "--signal=USR1", jobs[0])
    wait_for_steps(second, steps=5, job=jobs[1], cluster=cluster)
    saved = steps_in(first)
    assert 5 <= saved < STEPS, log_of(folder)
    cluster.run("scancel", jobs[1])
    assert cluster.wait_for_end(jobs[1], seconds=100) == "CANCELLED", log_of(folder)
    cluster.start_again(jobs[0])
    said = resume(folder, cluster=cluster, place=tmp_path)
    assert f"{first}: " in said
    assert "an array of 1 runs" in said
    again = json.loads((second / "slurm.json").read_text())["job"]
    assert again.endswith("_1")
    assert again != jobs[1]
    assert [cluster.wait_for_end(job, seconds=200) for job in (jobs[0], again)] == ["COMPLETED"] * 2, log_of(folder)
    assert (cluster.restarts(jobs[0]), cluster.restarts(again)) == (1, 0)
    assert f"continues after step {saved}" in (folder / f"slurm-{jobs[0]}.log").read_text()
    assert len({summary(point)["loss_digest"] for point in (first, second)}) == 1


def rank_process(rank: int) -> int:
    """The process of a rank that srun started."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        named = f"SLURM_PROCID={rank}".encode() in words and f"SLURMD_NODENAME={NODES[rank]}".encode() in words
        if named and b"run.py" in path.with_name("cmdline").read_bytes():
            return int(path.parent.name)
    raise AssertionError(f"rank {rank} does not run")
