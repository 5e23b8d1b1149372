"""`launch=slurm` with stubs of Slurm's programs: the job, its submission, and what the job's shell does with the ranks' exit code.

A real Slurm is in tests/cluster.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.commands import run_command
from ztk.core.launch.slurm import SlurmJob
from ztk.report.folder import write_failed_summary
from ztk.report.status import Status

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cluster" / "job.sbatch"
RUN = ("launch=slurm", "model=nano", "data=synthetic", "precision=fp32", "logger=disabled", "train.steps=3")


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Path:
    """Programs that write their arguments into `calls`; squeue shows the file `state`, and srun ends with the code in the file `code`."""
    place = tmp_path / "bin"
    place.mkdir()
    for name, ends in (
        ("sbatch", "echo 4711"),
        ("squeue", f"cat {place}/state"),
        ("srun", f"exit $(cat {place}/code)"),
        ("scontrol", ""),
    ):
        program = place / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> {place}/calls\n{ends}\n')
        program.chmod(0o755)
    (place / "state").write_text("")
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    return place


def submit(*words, cwd) -> subprocess.CompletedProcess[str]:
    cwd.mkdir(exist_ok=True)
    given = [word for word in RUN if word.partition("=")[0] not in [each.partition("=")[0] for each in words]]
    return run_command(*given, *words, cwd=cwd)


def calls(slurm: Path) -> list[str]:
    return (slurm / "calls").read_text().splitlines()


def run_job(
    script: Path, *, code: int, slurm: Path, restarts: int = 0, task: int = 0
) -> subprocess.CompletedProcess[str]:
    (slurm / "code").write_text(str(code))
    own = {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": str(restarts), "SLURM_ARRAY_TASK_ID": str(task)}
    environment = os.environ | own
    return subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=False)


def test_a_dry_run_prints_the_job_and_leaves_nothing(slurm, tmp_path):
    folder = tmp_path / "run"
    options = ("launch.nodes=2", "launch.gpus_per_node=8", "launch.cpus_per_rank=12", "launch.time=24:00:00")
    more = (
        "launch.partition=a100",
        "launch.account=me",
        "launch.sbatch=['--mail-type=END']",
        "launch.setup=[module load cuda]",
    )
    container = ("launch.container='apptainer exec --nv ztk.sif'", "launch.signal_seconds=60", "--dry-run")
    done = submit(*options, *more, *container, f"hydra.run.dir={folder}", cwd=tmp_path / "here")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "#!/bin/bash"
    asked = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    assert asked == {
        *("--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--cpus-per-task=12", "--time=24:00:00"),
        *("--partition=a100", "--account=me", "--mail-type=END", "--signal=USR1@60", "--requeue", "--open-mode=append"),
        *("--job-name=ztk-run", f"--output={folder}/slurm-%j.log"),
    }
    assert lines.index("module load cuda") < next(n for n, line in enumerate(lines) if line.startswith("srun"))
    srun = next(line for line in lines if line.startswith("srun"))
    assert "--cpus-per-task=12 apptainer exec --nv ztk.sif python " in srun
    assert " launch=local launch.ranks=16 " in srun
    assert "launch=slurm" not in srun
    assert "launch.nodes" not in srun
    assert not folder.exists()
    assert not (slurm / "calls").exists()


def test_a_run_is_submitted_once(slurm, tmp_path):
    folder = tmp_path / "run"
    done = submit(f"hydra.run.dir={folder}", cwd=tmp_path / "here")
    assert done.returncode == 0, done.stderr
    assert "submitted job 4711 of 1 ranks" in done.stderr
    assert calls(slurm) == [f"sbatch --parsable {folder}/job.sbatch"]
    assert json.loads((folder / "slurm.json").read_text()) == {"job": "4711"}
    (slurm / "state").write_text("PENDING")
    again = submit(f"hydra.run.dir={folder}", cwd=tmp_path / "here")
    assert again.returncode == 2
    assert "job 4711 of this run is PENDING" in again.stderr
    (slurm / "state").write_text("")  # it was cancelled
    assert submit(f"hydra.run.dir={folder}", cwd=tmp_path / "here").returncode == 0


def test_a_refusal_of_slurm_is_shown(slurm, tmp_path):
    (slurm / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: x' >&2\nexit 1\n")
    done = submit("launch.partition=x", cwd=tmp_path / "here")
    assert done.returncode == 2
    assert "invalid partition specified: x" in done.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("launch.nodes=2", "launch.ranks=3"), "launch.ranks=3: 2 nodes with 1 ranks each have 2"),
        (("launch.gpus_per_node=2", "launch.ranks_per_node=4"), "launch.ranks_per_node=2"),
        (("launch.time=soon",), "must be minutes, HOURS:MINUTES:SECONDS"),
        (("launch.sbatch=[gpu]",), "must be options of sbatch"),
        (("launch.debug=0",), "launch.debug"),
        (("launch=local", "launch.nodes=2"), "only with launch=slurm"),
        (("launch=local", "--dry-run"), "only with launch=slurm"),
        (("train.steps=0.5",), "train.steps"),
        (("checkpoint.local=true",), "launch=slurm needs a run folder that all machines share"),
        (
            ("-m", "sweep.launcher=slurm", "train.seed=1,2"),
            "sweep.launcher=slurm: is launch=slurm, and launch=slurm is given",
        ),
        (
            ("-m", "launch=local", "sweep.parallel=2", "train.seed=1,2"),
            "only with sweep.launcher=slurm and sweep.launcher=ray",
        ),
    ],
)
def test_a_fault_is_found_before_the_job_waits(words, reason, slurm, tmp_path):
    given = [word for word in RUN if word.partition("=")[0] not in [each.partition("=")[0] for each in words]]
    (tmp_path / "here").mkdir()
    done = run_command(*given, *words, cwd=tmp_path / "here")
    assert done.returncode == 2
    assert reason in done.stderr
    assert not (slurm / "calls").exists()


def test_a_machine_without_gpus_submits_a_run_on_gpus(slurm, tmp_path):
    done = submit("launch.gpus_per_node=8", "launch.nodes=2", "zero=stage3", "offload=cpu", cwd=tmp_path / "here")
    assert done.returncode == 0, done.stderr
    assert "submitted job 4711 of 16 ranks" in done.stderr


def test_points_of_a_sweep_are_an_array(slurm, tmp_path):
    """The array's shell starts the point of its number. `sweep.resume` submits the points that have neither a result nor a job in the queue."""
    folder, here = tmp_path / "sweep", tmp_path / "here"
    words = ("-m", "zero=stage1,stage2,stage3", "launch.nodes=2", "sweep.parallel=2", f"hydra.sweep.dir={folder}")
    done = submit(*words, cwd=here)
    assert done.returncode == 0, done.stdout + done.stderr
    script = folder / "job.sbatch"
    assert calls(slurm) == [f"sbatch --parsable {script}"]
    assert "#SBATCH --array=0,1,2%2\n#SBATCH --signal=USR1@300\n" in script.read_text()
    assert f"#SBATCH --output={folder}/slurm-%A_%a.log" in script.read_text()
    assert done.stdout.count("submitted") == 3
    points = [folder / job["folder"] for job in json.loads((folder / "sweep.json").read_text())["jobs"]]
    assert [json.loads((point / "slurm.json").read_text())["job"] for point in points] == ["4711_0", "4711_1", "4711_2"]
    run_job(script, code=143, slurm=slurm, task=2)
    started, requeued = calls(slurm)[1:]
    assert " zero=stage3 " in started
    assert started.endswith(f" launch=local launch.ranks=2 hydra.run.dir='{points[2]}'")
    assert requeued == "scontrol requeue 4711"  # SLURM_JOB_ID of this job alone
    (slurm / "calls").unlink()
    write_failed_summary(points[0], error="boom", status=Status.failed)
    (slurm / "squeue").write_text('#!/bin/sh\ncase "$*" in *4711_1*) echo PENDING ;; esac\n')
    resumed = run_command(f"sweep.resume={folder}", cwd=here)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"{points[1]}: job 4711_1 is PENDING, skipped" in resumed.stderr
    assert calls(slurm) == [f"sbatch --parsable {script}"]
    assert "#SBATCH --array=0,2\n" in script.read_text()
    assert "stage2" not in script.read_text()


def test_points_with_other_resources_are_an_array_of_their_own(slurm, tmp_path):
    folder = tmp_path / "sweep"
    done = submit("-m", "launch.nodes=1,2", "zero=stage1,stage3", f"hydra.sweep.dir={folder}", cwd=tmp_path / "here")
    assert done.returncode == 0, done.stdout + done.stderr
    scripts = [Path(call.removeprefix("sbatch --parsable ")) for call in calls(slurm)]
    assert scripts == [folder / "job.sbatch", folder / "job1.sbatch"]
    assert [f"--nodes={count}" in script.read_text() for count, script in enumerate(scripts, start=1)] == [True] * 2
    assert ["--array=0,1\n" in scripts[0].read_text(), "--array=2,3\n" in scripts[1].read_text()] == [True] * 2


def test_a_dry_run_of_a_sweep_prints_the_array_and_leaves_nothing(slurm, tmp_path):
    folder = tmp_path / "sweep"
    line = ("-m", "zero=stage1,stage3", "sweep.launcher=slurm", "--dry-run", f"hydra.sweep.dir={folder}")
    (tmp_path / "here").mkdir()
    done = run_command(*RUN[1:], *line, cwd=tmp_path / "here")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("#!/bin/bash\n#SBATCH --job-name=ztk-sweep\n#SBATCH --array=0,1\n") == 1
    assert not folder.exists()
    assert not (slurm / "calls").exists()


@pytest.fixture(params=["own", "example"])
def script(request, tmp_path) -> Path:
    if request.param == "example":
        return EXAMPLE
    job = SlurmJob(
        command=["true"],
        name="job",
        options=[],
        cpus_per_task=None,
        setup=[],
        container="",
        log="log",
        signal_seconds=60,
        requeues=100,
    )
    path = tmp_path / "job.sbatch"
    path.write_text(job.script())
    return path


@pytest.mark.parametrize("code", [138, 140, 143])
def test_a_job_that_saved_after_a_signal_goes_into_the_queue_again(code, script, slurm):
    done = run_job(script, code=code, slurm=slurm)
    assert done.returncode == code
    assert calls(slurm)[0].startswith("srun --kill-on-bad-exit=0 ")
    assert calls(slurm)[1:] == ["scontrol requeue 4711"]


@pytest.mark.parametrize(("code", "restarts"), [(0, 0), (1, 0), (2, 0), (137, 0), (138, 100)])
def test_no_other_job_goes_into_the_queue_again(code, restarts, script, slurm):
    assert run_job(script, code=code, slurm=slurm, restarts=restarts).returncode == code
    assert len(calls(slurm)) == 1


def test_ranks_of_a_ray_cluster_are_counted_by_the_user(tmp_path):
    done = submit("launch=ray", cwd=tmp_path / "here")
    assert done.returncode == 2
    assert "launch=ray: needs launch.ranks=N" in done.stderr
