"""Ranks of a quick sweep are forks of one interpreter: the same bits as fresh ones, failures and kills as there."""

import os
import signal
from pathlib import Path

import pytest

import ztk
from tests.cli.test_calls import SMALL
from ztk.launch import Child, Forker, python_path, run_children

WORDS = (
    *(word for word in SMALL if not word.startswith(("train.quick", "launch.ranks"))),
    "launch.ranks=2",
    "train.steps=2",
)


def test_forked_ranks_have_the_bits_of_fresh_ones(tmp_path):
    shared = ztk.sweep(*WORDS, "sweep.quick=true", folder=tmp_path / "shared", quiet=True, zero=["stage0", "stage3"])
    alone = ztk.run(*WORDS, "train.quick=true", "zero=stage3", folder=tmp_path / "alone", quiet=True)
    fresh = alone.runs.iloc[0]
    for digest in shared.runs["loss_digest"]:
        assert digest == fresh["loss_digest"]
    numbers = ["step", "loss", "grad_norm"]
    last = shared.history[shared.history["run"] == shared.runs["run"].iloc[1]]
    assert last[numbers].to_numpy().tolist() == alone.history[numbers].to_numpy().tolist()


@pytest.fixture
def forker():
    environment = {**os.environ, "PYTHONPATH": python_path()}
    made = Forker(threads=1, environment=environment)
    yield made
    made.close()


def child(rank: int, *, folder: Path, config: str = "absent.yaml") -> Child:
    environment = {**os.environ, "RANK": str(rank), "OWN": f"of {rank}"}
    return Child(
        rank=rank, command=["python", "-m", "ztk.worker", config], environment=environment, log=folder / f"{rank}.log"
    )


def test_a_fork_that_fails_and_one_that_is_killed(forker, tmp_path):
    first, second = run_children([child(0, folder=tmp_path), child(1, folder=tmp_path)], start=forker.start)
    assert first.code == second.code == 1
    for rank in (0, 1):
        assert "FileNotFoundError" in (tmp_path / f"{rank}.log").read_text()
    started = forker.start(child(0, folder=tmp_path), log=open(tmp_path / "0.log"))
    os.kill(started.pid, signal.SIGKILL)
    assert started.wait() == -signal.SIGKILL


def test_ranks_end_with_their_interpreter(forker, tmp_path):
    forker.start(child(0, folder=tmp_path), log=open(tmp_path / "0.log")).wait()
    os.mkfifo(tmp_path / "waits.yaml")  # opened for reading until somebody writes: never
    waiting = forker.start(child(1, folder=tmp_path, config=str(tmp_path / "waits.yaml")), log=open(tmp_path / "1.log"))
    assert waiting.poll() is None
    forker.close()
    assert waiting.wait() == -signal.SIGKILL
