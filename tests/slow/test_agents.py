"""Two agents of torchrun, as on two nodes: after one node's failure both restart their ranks, and the ranks agree on one start.

Each agent counts its own restarts (pytorch issues 108158 and 135712): the agent of a killed rank raises TORCHELASTIC_RESTART_COUNT, the
other agent restarts its rank for the changed membership with the old count.
"""

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


def agent(node: int, *, port: int, folder: Path, steps: int) -> subprocess.Popen:
    torchrun = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}")
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun, "--rdzv-id=agents", "--max-restarts=3"]
    command += [str(ROOT / "run.py"), *RUN, f"train.steps={steps}", f"hydra.run.dir={folder}"]
    log = (folder.parent / f"agent-{node}.log").open("w")
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=log, stderr=log, cwd=ROOT)


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


@pytest.mark.parametrize("stopped", [True, False], ids=["rank 0 stopped", "rank 0 alive"])
def test_both_agents_restart_after_one_rank_was_killed(stopped, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder, steps = tmp_path / "run", 400
    agents = [agent(node, port=port, folder=folder, steps=steps) for node in range(2)]
    try:
        end = time.monotonic() + 120
        while steps_in(folder) < 50 and time.monotonic() < end:
            time.sleep(0.05)
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
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert json.loads((folder / "summary.json").read_text())["status"] == "done"
