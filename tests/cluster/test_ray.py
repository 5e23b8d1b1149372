"""`launch=ray` on a real Ray: `pytest tests/cluster/test_ray.py --slow`. The first test has the Ray that its command starts."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import ROOT

pytest.importorskip("ray", reason="needs ray: pip install 'ztk[ray]'")
pytestmark = pytest.mark.slow
RUN = (
    *("model=nano", "data=synthetic", "data.seq_len=32", "precision=fp32", "logger=disabled", "launch.threads=1"),
    *("train.global_batch_size=8", "train.micro_batch_size=4", "zero=stage3", "launch.timeout_seconds=100"),
    *("checkpoint.every=10", "launch.device=cpu"),
)
PORT = 26379


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment of commands for a Ray with two cores, which starts once for all tests."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        own = {"RAY_AUTH_MODE": "token", "RAY_TMPDIR": folder}
        command = [Path(sys.executable).parent / "ray", "start", "--head", "--block", f"--port={PORT}", "--num-cpus=2"]
        with subprocess.Popen(
            [*command, "--include-dashboard=false"],
            env=os.environ | own,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as head:
            yield own | {"RAY_ADDRESS": f"127.0.0.1:{PORT}"}
            head.terminate()


def start(
    *words: str, folder: Path, cluster: dict[str, str] | None = None, ranks: int = 2, sweep: bool = False
) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | (cluster or {})
    placed = f"hydra.sweep.dir={folder}" if sweep else f"hydra.run.dir={folder}"
    command = [sys.executable, str(ROOT / "run.py"), *RUN, f"launch.ranks={ranks}", *words, placed, *["-m"] * sweep]
    return subprocess.Popen(
        command, env=environment, cwd=folder.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(*words: str, folder: Path) -> tuple[int, str]:
    process = start(*words, folder=folder)
    output = process.communicate(timeout=300)[0]
    return process.returncode, output


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def steps_in(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def wait_for_steps(folder: Path, *, steps: int) -> None:
    end = time.monotonic() + 200
    while steps_in(folder) < steps:
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


def test_a_killed_rank_is_the_first_cause(tmp_path, cluster):
    folder = tmp_path / "run"
    process = start("launch=ray", "train.steps=1000000", folder=folder, cluster=cluster)
    wait_for_steps(folder, steps=5)
    os.kill(rank_process(1, folder=folder), signal.SIGKILL)
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 1, output
    assert "rank 1 was killed by SIGKILL" in output
    assert summary(folder)["status"] == "failed"


def test_a_signal_for_the_command_saves_the_step(tmp_path, cluster):
    """SIGTERM is `ray job stop`. A connection to Ray replaces the handler of SIGTERM by one that ends the process."""
    folder = tmp_path / "run"
    process = start("launch=ray", "train.steps=1000000", folder=folder, cluster=cluster)
    wait_for_steps(folder, steps=5)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "This continues the run" in output
    assert summary(folder)["status"] == "interrupted"


def test_failures_start_the_ranks_again(tmp_path, cluster):
    """SIGKILL of a rank, then of the worker of Ray above another one."""
    local, folder = tmp_path / "local", tmp_path / "ray"
    code, output = run("train.steps=120", folder=local)
    assert code == 0, output
    pause = ("callbacks.pause._target_=tests.cluster.pause.Pause", "callbacks.pause.seconds=0.1")
    words = ("launch=ray", "launch.max_failures=2", "train.steps=120", *pause)
    process = start(*words, folder=folder, cluster=cluster)
    wait_for_steps(folder, steps=25)
    os.kill(rank_process(1, folder=folder), signal.SIGKILL)
    wait_for_steps(folder, steps=75)
    rank = rank_process(0, folder=folder)
    os.kill(int(Path(f"/proc/{rank}/stat").read_text().split()[3]), signal.SIGKILL)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert output.count("continues after step") == 2, output
    first, second = summary(folder)["failures"]
    assert first.startswith("rank 1 was killed by SIGKILL")
    assert second.startswith("rank 0 was lost with its worker of Ray: ")
    assert summary(folder)["loss_digest"] == summary(local)["loss_digest"]
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [
        *range(1, 121)
    ]


def test_ray_train_gets_rows_of_metrics(tmp_path, cluster):
    folder, reports = tmp_path / "run", tmp_path / "reports"
    own = {"RAY_TRAIN_CALLBACKS": "tests.cluster.reports.Reports", "RAY_TRAIN_REPORTS": str(reports)}
    process = start("launch=ray", "train.steps=30", folder=folder, cluster=cluster | own)
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 0, output
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert json.loads(reports.read_text().splitlines()[-1]) == [last, {}]


def test_points_of_a_sweep_run_at_once(tmp_path, cluster):
    """Four points of one core each on two cores: two wait until others end."""
    folder = tmp_path / "sweep"
    pause = ("callbacks.pause._target_=tests.cluster.pause.Pause", "callbacks.pause.seconds=0.1")
    words = ("sweep.launcher=ray", "train.steps=100", "optimizer.lr=1e-3,2e-3", "train.seed=0,1", *pause)
    process = start(*words, folder=folder, cluster=cluster, ranks=1, sweep=True)
    end, most = time.monotonic() + 300, 0
    while process.poll() is None:
        assert time.monotonic() < end
        points = [path.parent for path in folder.glob("*/metrics.jsonl") if not (path.parent / "summary.json").exists()]
        most = max(most, sum(0 < steps_in(point) < 100 for point in points))
        time.sleep(0.1)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert most == 2, output
    assert output.count(f"ztk: {folder}/") == 4, output
    assert output.count(": 1 ranks run on ") == 4, output
    done = [summary(path.parent) for path in folder.glob("*/summary.json")]
    assert [each["status"] for each in done] == ["done"] * 4
    assert len({each["loss_digest"] for each in done}) == 4


def test_an_interrupted_sweep_continues(tmp_path, cluster):
    folder = tmp_path / "sweep"
    pause = ("callbacks.pause._target_=tests.cluster.pause.Pause", "callbacks.pause.seconds=0.1")
    words = ("launch=ray", "train.steps=100", "optimizer.lr=1e-3,2e-3", *pause)
    process = start(*words, folder=folder, cluster=cluster, ranks=1, sweep=True)
    end = time.monotonic() + 200
    while len(points := list(folder.glob("*/metrics.jsonl"))) < 2 or min(map(steps_in, (p.parent for p in points))) < 5:
        assert time.monotonic() < end and process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 130, output
    assert {summary(path.parent)["status"] for path in points} == {"interrupted"}, output
    command = [sys.executable, str(ROOT / "run.py"), f"sweep.resume={folder}", "trust=true"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | cluster
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all("continues after step" in (path.parent / "ranks" / "rank0.log").read_text() for path in points)


def test_a_run_that_gets_no_room_ends(tmp_path, cluster):
    folder = tmp_path / "run"
    process = start("launch=ray", "launch.start_seconds=5", folder=folder, cluster=cluster, ranks=8)
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 1, output
    assert "Ray has not started 8 workers with {'CPU': 1} each within launch.start_seconds=5" in output
    assert summary(folder)["status"] == "failed"


def test_a_run_without_ranks_is_refused(tmp_path):
    command = [sys.executable, str(ROOT / "run.py"), *RUN, "launch=ray"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "launch=ray: needs launch.ranks=N" in done.stderr


def test_a_script_in_workers_of_ray_train(tmp_path, cluster):
    """`examples/cluster/ray_train.py`, undisturbed, then with a worker that SIGKILL ends. A report, of every tenth step, takes 2 s: Ray Train
    looks for one so often."""
    losses = {}
    for name in ("undisturbed", "killed"):
        folder = tmp_path / name
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "examples/cluster/ray_train.py"), folder, "2", "--device=cpu", "--steps=120"],
            env=os.environ | {"PYTHONPATH": str(ROOT)} | cluster,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if name == "killed":
            end = time.monotonic() + 200
            while not list((folder / "checkpoints").glob("step-0000[3-9]0")):
                assert time.monotonic() < end and process.poll() is None, process.communicate()[0]
                time.sleep(0.05)
            os.kill(worker_of_ray_train(), signal.SIGKILL)
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, output
        assert ("continues after step" in output) is (name == "killed"), output
        losses[name] = next(line.partition("done: ")[2] for line in output.splitlines() if "done: " in line)
    assert losses["killed"] == losses["undisturbed"]


def worker_of_ray_train() -> int:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:  # it has ended
            continue
        if line.startswith(b"ray::RayTrainWorker"):
            return int(path.parent.name)
    raise AssertionError("no worker of Ray Train runs")
