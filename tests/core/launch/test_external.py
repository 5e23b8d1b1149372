"""torchrun's and srun's environments. That ranks agree through a store is tested with processes in test_run.py."""

import json
import os
import threading

import pytest

from ztk.cli.session import Session
from ztk.config import ConfigError
from ztk.core.launch import ExternalRank, is_restart, remember_folder, restarted
from ztk.core.launch.errors import RankFailure
from ztk.core.launch.external import _first_host, _tasks_on_node

NAMES = (
    *(
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_NTASKS",
    ),
    *("SLURM_PROCID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE", "SLURM_JOB_ID"),
)
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_RANK": "3",
}
PMI = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
FIRST = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
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


def set_all(monkeypatch, values) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("values", [MPI, PMI, PMI | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}], ids=str)
def test_tasks_of_mpi_are_ranks_where_the_first_is_known_and_refused_elsewhere(monkeypatch, values):
    """In a job of Slurm, mpirun starts one process per node by srun, which starts the tasks."""
    set_all(monkeypatch, values)
    with pytest.raises(
        ValueError, match=r"SIZE=4: mpi\w+ started several tasks, and each would run this job alone; use torchrun"
    ):
        ExternalRank.of_environment()
    set_all(monkeypatch, FIRST)
    found = ExternalRank.of_environment()
    assert found is not None
    assert (found.rank, found.world_size, found.local_world_size) == (3, 4, 2)
    assert os.environ["LOCAL_RANK"] == "1"


@pytest.mark.parametrize(
    "values",
    [
        {"PMIX_RANK": "1"},
        {"WORLD_SIZE": "2"},
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"},
        {"SUBMITIT_LOCAL_NTASKS": "2", "SUBMITIT_LOCAL_GLOBALID": "0"},
        {"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0", "FLUX_TASK_LOCAL_ID": "0"},
        {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"},
        {"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "0"},
        {"RANK": "x", "WORLD_SIZE": "two"},
    ],
    ids=lambda values: next(iter(values)),
)
def test_several_tasks_whose_places_are_not_known_are_refused(monkeypatch, values):
    set_all(monkeypatch, values)
    with pytest.raises(ValueError, match="torchrun|srun"):
        ExternalRank.of_environment()


@pytest.mark.parametrize(
    "values",
    [
        {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"},
        {"SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "1"},  # the script of sbatch on one node
        {"SLURM_NTASKS": "8"},  # the shell of salloc
        {"WORLD_SIZE": "1"},
    ],
    ids=lambda values: str(len(values)),
)
def test_a_single_task_starts_its_ranks_itself(monkeypatch, values):
    set_all(monkeypatch, values)
    assert ExternalRank.of_environment() is None


def test_srun_with_pmi_is_srun(monkeypatch):
    set_all(monkeypatch, STEP | {"PMI_SIZE": "10", "PMI_RANK": "9", "PMIX_RANK": "9"})
    found = ExternalRank.of_environment()
    assert found is not None and found.starter == "srun" and found.rank == 9


def test_a_job_of_a_sweep_with_several_tasks_is_refused_in_each(monkeypatch):
    """submitit starts the session of the login node in every task."""
    session = Session()
    set_all(monkeypatch, STEP)
    with pytest.raises(ConfigError, match="srun started 10 tasks for this job, .*hydra.launcher.tasks_per_node=1"):
        session._check_alone()


def test_restarts_are_known_by_the_count_or_by_the_note_of_an_agent(monkeypatch, tmp_path):
    assert not is_restart()
    for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"):
        for value, expected in (("0", False), ("1", True)):
            monkeypatch.setenv(name, value)
            assert is_restart() is expected
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_0" / "0" / "error.json"))
    assert not is_restart()
    remember_folder("outputs/first", command="run.py a")
    assert is_restart()
    assert restarted(["a"], command="run.py a") == ["a", "hydra.run.dir='outputs/first'"]
    assert restarted(["-m", "a"], command="run.py a") == ["-m", "a", "sweep.resume='outputs/first'"]
    for own in (["hydra.run.dir=x"], ["-m", "sweep.resume=x"]):
        assert restarted(own, command="run.py a") == own


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
