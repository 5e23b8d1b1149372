"""Two agents of torchrun, as on two nodes: after one node's failure both restart their ranks, and the ranks agree on one start. The same
of one agent of nvidia-resiliency-ext's `ft_launcher`.

Each agent counts its own restarts (pytorch issues 108158 and 135712): the agent of a killed rank raises TORCHELASTIC_RESTART_COUNT, the
other agent restarts its rank for the changed membership with the old count.
"""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = (
    *("model=nano", "data=synthetic", "data.seq_len=32", "precision=fp32", "logger=disabled", "launch.threads=1"),
    *("train.global_batch_size=4", "train.micro_batch_size=2", "zero=stage1", "launch.timeout_seconds=100"),
    *("checkpoint.every=20", "checkpoint.resume=auto", "launch.device=cpu"),
)


STEPS = 400
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def agent(
    node: int, *, port: int, folder: Path, launcher: tuple[str, ...] = TORCHRUN, nodes: int = 2
) -> subprocess.Popen:
    """An agent of one of `nodes` nodes, which share two ranks."""
    place = (f"--nnodes={nodes}", f"--nproc-per-node={2 // nodes}", f"--rdzv-endpoint=localhost:{port}")
    command = [*launcher, *place, "--rdzv-backend=c10d", "--rdzv-id=agents", "--max-restarts=3"]
    command += [str(ROOT / "run.py"), *RUN, f"train.steps={STEPS}", f"hydra.run.dir={folder}"]
    log = (folder.parent / f"agent-{node}.log").open("w")
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=log, stderr=log, cwd=ROOT)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ranks_of(agents: list[subprocess.Popen]) -> dict[int, int]:
    """Number of each rank -> its process."""
    found = {}
    for parent in agents:
        for child in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split():
            words = dict(
                word.split("=", 1) for word in Path(f"/proc/{child}/environ").read_text().split("\0") if "=" in word
            )
            if "RANK" in words:
                found[int(words["RANK"])] = int(child)
    return found


def steps_in(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def wait_for_steps(folder: Path, *, steps: int) -> None:
    end = time.monotonic() + 300
    while steps_in(folder) < steps:
        assert time.monotonic() < end, f"{steps_in(folder)} steps"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def digest(tmp_path_factory) -> str:
    """Of an undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    one = agent(0, port=free_port(), folder=folder, nodes=1)
    assert one.wait(timeout=300) == 0, (folder.parent / "agent-0.log").read_text()[-4000:]
    return digest_of(folder)


def digest_of(folder: Path) -> str:
    return json.loads((folder / "summary.json").read_text())["loss_digest"]


@pytest.mark.parametrize("stopped", [True, False], ids=["rank 0 stopped", "rank 0 alive"])
def test_both_agents_restart_after_one_rank_was_killed(stopped, digest, tmp_path):
    port, folder = free_port(), tmp_path / "run"
    agents = [agent(node, port=port, folder=folder) for node in range(2)]
    try:
        wait_for_steps(folder, steps=50)
        ranks = ranks_of(agents)
        if stopped:
            os.kill(ranks[0], signal.SIGSTOP)
        os.kill(ranks[1], signal.SIGKILL)
        codes = [one.wait(timeout=240) for one in agents]
    finally:
        for one in agents:
            one.kill()
    logs = "".join((tmp_path / f"agent-{node}.log").read_text() for node in range(2))
    assert codes == [0, 0], logs[-4000:]
    assert "continues after step" in logs
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert digest_of(folder) == digest


@pytest.mark.skipif(
    importlib.util.find_spec("nvidia_resiliency_ext") is None, reason="needs nvidia-resiliency-ext 0.4.1 (ft_launcher)"
)
def test_ft_launcher_restarts_a_killed_rank(digest, tmp_path):
    folder = tmp_path / "run"
    ft_launcher = (str(Path(sys.executable).parent / "ft_launcher"), "--ignore-missing-fault-tol-cfg")
    one = agent(0, port=free_port(), folder=folder, launcher=ft_launcher, nodes=1)
    try:
        wait_for_steps(folder, steps=50)
        os.kill(ranks_of([one])[1], signal.SIGKILL)
        code = one.wait(timeout=300)
    finally:
        one.kill()
    log = (tmp_path / "agent-0.log").read_text()
    assert code == 0, log[-4000:]
    assert "continues after step" in log, log[-4000:]
    assert digest_of(folder) == digest
