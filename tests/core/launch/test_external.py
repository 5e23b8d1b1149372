"""torchrun's and srun's environments. That ranks agree through a store is tested with processes in test_run.py."""

import json
import os
import threading

import pytest

from ztk.core.launch import ExternalRank
from ztk.core.launch.errors import RankFailure
from ztk.core.launch.external import _first_host, _tasks_on_node

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS")
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "10",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
    "SLURM_STEP_NODELIST": "gpu[007-009]",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that monkeypatch restores the variable that the code sets
        monkeypatch.delenv(name)


def test_a_plain_process_is_no_rank():
    assert ExternalRank.of_environment() is None


def test_torchrun(monkeypatch):
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    found = ExternalRank.of_environment()
    assert found == ExternalRank(rank=3, world_size=8, local_world_size=4, starter="torchrun")
    assert "hydra.run.dir=." in found.arguments(["zero=stage1"])
    own = found.arguments(["hydra.run.dir=outputs/mine", "zero=stage1"])
    assert [word for word in own if word.startswith("hydra.run.dir=")] == ["hydra.run.dir=."]  # a key has one value
    for sweep in (["-m", "zero=stage0,stage1"], ["sweep=stages"]):
        with pytest.raises(ValueError, match="cannot sweep"):
            found.arguments(sweep)


def test_srun(monkeypatch):
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    found = ExternalRank.of_environment()
    assert found == ExternalRank(rank=9, world_size=10, local_world_size=2, starter="srun")
    assert os.environ["MASTER_ADDR"] == "gpu007"
    assert 15000 <= int(os.environ["MASTER_PORT"]) < 31000


def test_one_task_of_srun_starts_its_ranks_itself(monkeypatch):
    for name, value in (STEP | {"SLURM_STEP_NUM_TASKS": "1"}).items():
        monkeypatch.setenv(name, value)
    assert ExternalRank.of_environment() is None


def test_lists_of_slurm():
    assert [_tasks_on_node("4(x2),1", node=node) for node in range(3)] == [4, 4, 1]
    assert [_first_host(text) for text in ("node[03-07,12],login", "a,b", "host-1")] == ["node03", "a", "host-1"]


def test_torchrun_never_finds_a_part_of_an_error(monkeypatch, tmp_path):
    """It looks for the file while the rank may still write it, ends the rank, and fails over JSON that is not complete."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    failure = RankFailure(
        rank=0, kind="ValueError", message="long", trace="x" * (32 << 20), time=0.0, secondary=False, code=1
    )
    rank = ExternalRank(rank=0, world_size=2, local_world_size=2, starter="torchrun")
    writer = threading.Thread(target=rank.tell_starter, args=(failure,))
    writer.start()
    while not path.exists():
        pass
    assert json.loads(path.read_text())["message"]["message"] == str(failure)
    writer.join()
