"""A run that loses a rank goes on by itself, with the same global batch and the losses that it would have had."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import run_command

CHECKOUT = Path(__file__).parents[2]
SMALL = (
    *(
        "model.layers=2",
        "model.dim=32",
        "model.heads=2",
        "model.kv_heads=1",
        "model.hidden_dim=64",
        "model.vocab_size=64",
    ),
    *("data=synthetic", "data.seq_len=16", "train.micro_batch_size=2", "precision=fp32", "checkpoint.every=2"),
    *("scheduler=constant", "scheduler.warmup_steps=0", "logger=disabled", "launch.threads=1"),
)
KILLED = {"rank": 1, "where": "forward", "count": 8, "how": "kill"}
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1")
# fp32 sums in another order: each of 8 steps may move a loss near 4 by some units of 2e-7
TOLERANCE = 1e-5


def run(*arguments: str, cwd: Path, fault: dict, starter: tuple[str, ...] = ()) -> str:
    words = ("--config-dir", str(CHECKOUT / "tests" / "tasks"), "task=faulty", *SMALL, *arguments)
    planted = {"FAULT": json.dumps(fault)}
    if starter:
        command = [sys.executable, *starter, str(CHECKOUT / "run.py"), *words]
        environment = os.environ | planted | {"PYTHONPATH": str(CHECKOUT)}
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
    else:
        done = run_command(*words, cwd=cwd, environment=planted)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def losses_of(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["tokens"] for row in rows] == [row["step"] * 8 * 16 for row in rows]
    return [row["loss"] for row in rows]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """8 steps on one rank, with the global batch of the others and all checkpoints."""
    folder = tmp_path_factory.mktemp("straight")
    options = ("launch.ranks=1", "train.global_batch_size=8", "train.steps=8", "checkpoint.keep=4")
    run(*options, f"hydra.run.dir={folder}", cwd=folder, fault={"rank": -1})
    return folder


def test_four_ranks_lose_one_and_go_on_as_three(straight, tmp_path):
    options = ("zero=stage2", "launch.ranks=4", "launch.elastic=true", "train.steps=8", f"hydra.run.dir={tmp_path}")
    told = run(*options, cwd=tmp_path, fault=KILLED)
    assert "rank 1 was killed by SIGKILL" in told and "goes on with 3 of 4 ranks" in told
    assert "continues after step" in told and "saved by 4 ranks" in told
    assert losses_of(tmp_path) == pytest.approx(losses_of(straight), rel=TOLERANCE)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "done" and summary["world_size"] == 3 and len(summary["lost_ranks"]) == 1
    assert sorted(path.name for path in tmp_path.glob("ranks*")) == ["ranks", "ranks-of-4"]


def test_a_pipeline_goes_on_with_as_many_ranks_as_its_stages_allow(straight, tmp_path):
    options = (
        "zero=stage1",
        "topology=pp2",
        "launch.ranks=4",
        "train.accumulation_steps=2",
        "launch.elastic=true",
        "train.steps=8",
    )
    fault = {"rank": 1, "where": "optimizer", "count": 4, "how": "kill"}
    told = run(*options, f"hydra.run.dir={tmp_path}", cwd=tmp_path, fault=fault)
    assert "rank 1 was killed by SIGKILL" in told and "goes on with 2 of 4 ranks" in told
    assert losses_of(tmp_path) == pytest.approx(losses_of(straight), rel=TOLERANCE)


def test_torchrun_restarts_a_run_that_names_no_checkpoint(straight, tmp_path):
    """B3: the second start began at step 1, dropped rows and pruned checkpoints."""
    folder = tmp_path / "run"
    options = ("train.global_batch_size=8", "train.steps=8", f"hydra.run.dir={folder}")
    told = run(*options, cwd=tmp_path, fault=KILLED | {"count": 11}, starter=TORCHRUN)
    assert "continues after step 4 " in told or "continues after step 2 " in told
    assert losses_of(folder) == pytest.approx(losses_of(straight), rel=TOLERANCE)


def test_torchrun_goes_on_with_more_ranks_and_starts_them_again(straight, tmp_path):
    """The folder is from one rank and lacks its last checkpoints; then a rank is lost during the run."""
    folder = Path(shutil.copytree(straight, tmp_path / "run"))
    for step in (6, 8):
        shutil.rmtree(folder / "checkpoints" / f"step-00000{step}")
    options = ("zero=stage3", "checkpoint.resume=auto", "train.steps=8", f"hydra.run.dir={folder}")
    told = run(*options, cwd=tmp_path, fault=KILLED | {"count": 6}, starter=TORCHRUN)
    assert (
        "continues after step 4 " in told and "saved by 1 ranks" in told
    )  # `latest` names a folder that no longer exists
    assert "continues after step 6 " in told and "saved by 2 ranks" in told
    assert losses_of(folder) == pytest.approx(losses_of(straight), rel=TOLERANCE)
    assert json.loads((folder / "summary.json").read_text())["world_size"] == 2
