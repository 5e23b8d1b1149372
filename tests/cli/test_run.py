"""`python run.py` from the arguments to the exit code, with a task that only writes its rank. A start takes seconds, so there are few."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands import run_command

CHECKOUT = Path(__file__).parents[2]
FAKE = ("--config-dir", str(CHECKOUT / "tests" / "tasks"), "task=fake")
WAITING = 60


def run(
    *arguments: str, cwd: Path, plan: dict | None = None, starter: tuple[str, ...] = ()
) -> subprocess.CompletedProcess:
    command = [sys.executable, *starter, str(CHECKOUT / "run.py"), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment(plan), capture_output=True, text=True, timeout=2 * WAITING)


def environment(plan: dict | None) -> dict[str, str]:
    return os.environ | {"FAKE_TASK": json.dumps(plan or {}), "PYTHONPATH": str(CHECKOUT)}


def folders(cwd: Path) -> list[Path]:
    return sorted(file.parent for file in cwd.rglob("overrides.json"))


def test_a_run_writes_its_record(tmp_path):
    done = run(*FAKE, "zero=stage3", "offload=nvme", "train.steps=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2" in done.stdout and "rank 1 of 2" not in done.stdout
    (folder,) = folders(tmp_path)
    assert json.loads((folder / "overrides.json").read_text())["zero"] == "stage3"
    assert "optimizer: nvme" in (folder / "config.yaml").read_text()
    assert "rank 0 of 2" in (folder / "ranks" / "rank0.log").read_text()
    assert "rank 1 of 2" in (folder / "ranks" / "rank1.log").read_text()


def test_a_refused_command_leaves_nothing(tmp_path):
    done = run("zero=stage9", "+foo=1", cwd=tmp_path)
    assert done.returncode == 2
    assert "zero=stage9" in done.stderr and "foo" in done.stderr and "Traceback" not in done.stderr
    done = run("zero=stage1", "zero.max_live_parameters=5", "offload.parameters=cpu", cwd=tmp_path)
    assert done.returncode == 2
    assert "max_live" in done.stderr and "use zero=stage3" in done.stderr and "Traceback" not in done.stderr
    assert not folders(tmp_path) and not list(tmp_path.rglob("*.yaml"))


def test_a_forked_command_equals_a_started_one(tmp_path):
    """tests/commands.py stands for run.py in other files: the same code, output and files."""
    plan = {"rank": 0, "step": 1, "how": "raise"}  # the rank that prints: another might be stopped before it has
    failing = (*FAKE, "train.steps=3", "launch.ranks=2", "hydra.run.dir=run")
    for number, (words, code) in enumerate(((("zero=stage9",), 2), (failing, 1))):
        found = []
        for name, start in (("started", run), ("forked", forked)):
            folder = tmp_path / f"{name}{number}"
            folder.mkdir()
            done = start(*words, cwd=folder, plan=plan)
            assert done.returncode == code, done.stderr
            files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
            found.append((done.stdout.replace(str(folder), ""), done.stderr.replace(str(folder), ""), files))
        assert found[0] == found[1]


def forked(*words: str, cwd: Path, plan: dict) -> subprocess.CompletedProcess:
    return run_command(*words, cwd=cwd, environment={"FAKE_TASK": json.dumps(plan)})


def test_help_shows_groups_keys_and_examples(tmp_path):
    done = run("--help", cwd=tmp_path)
    assert done.returncode == 0
    for words in ("zero: ddp, fsdp2, stage0, stage1, stage2, stage3", "global_batch_size: null", "python run.py -m"):
        assert words in done.stdout


def test_a_sweep_continues_after_a_failing_and_a_refused_job(tmp_path):
    plan = {"rank": 1, "step": 0, "how": "raise", "stage": 1}
    line = (*FAKE, "zero=stage1,ddp,stage2", "offload=cpu", "train.steps=1", "-m")
    done = run_command(*line, cwd=tmp_path, environment={"FAKE_TASK": json.dumps(plan)})
    assert done.returncode == 1
    (record,) = tmp_path.rglob("sweep.json")
    jobs = json.loads(record.read_text())["jobs"]
    found = [json.loads((record.parent / job["folder"] / "summary.json").read_text())["status"] for job in jobs]
    assert found == ["failed", "refused", "done"]
    assert "rank 1: ValueError: boom" in done.stdout and "zero=ddp has no offload" in done.stdout
    assert "3 jobs" in done.stdout and done.stderr.count("Traceback") == 1
    assert '/tasks/fake_task.py", line' in done.stderr  # a ValueError of the user's code is found by its file and line


def test_an_interrupt_stops_a_sweep_at_once(tmp_path):
    command = [sys.executable, str(CHECKOUT / "run.py"), *FAKE, "-m", "zero=stage0,stage1", "train.steps=2000"]
    sweep = subprocess.Popen(
        command, cwd=tmp_path, env=environment(None), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    end = time.monotonic() + WAITING
    while len(list(tmp_path.rglob("pid*"))) < 2:
        assert time.monotonic() < end, "the ranks did not start"
        time.sleep(0.05)
    time.sleep(0.1)
    sweep.send_signal(signal.SIGINT)
    _, printed = sweep.communicate(timeout=10)
    assert sweep.returncode == 130
    assert b"Traceback" not in printed
    assert len(folders(tmp_path)) == 1
    for file in tmp_path.rglob("pid*"):
        assert not Path("/proc", file.read_text()).exists()


@pytest.mark.parametrize("fails", [False, True])
def test_torchrun_makes_one_folder_and_shows_the_error(fails, tmp_path):
    plan = {"rank": 1, "step": 1, "how": "raise"} if fails else None
    starter = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1")
    steps = "train.steps=100" if fails else "train.steps=2"
    done = run(*FAKE, steps, cwd=tmp_path, plan=plan, starter=starter)
    (folder,) = folders(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    log = (folder / "ranks" / "rank1.log").read_text()
    assert log.count("rank 1 of 2") == log.count("ValueError: boom") + (not fails) == 1 + fails
    if fails:
        assert done.returncode == 1
        # The second start uses the folder of the first. Rank 0 may be stopped before it prints: rank 1 raises later.
        assert done.stdout.count("rank 1 of 2") == 2
        assert summary["error"] == "rank 1: ValueError: boom" and "ValueError: boom" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert summary["status"] == "done"
        assert "\n  ranks: 2  # " in (folder / "config.yaml").read_text()


def test_a_closed_pipe_ends_no_run(tmp_path):
    """Like `run.py ... | head -1`, with standard error in the same pipe."""
    words = (*FAKE, "launch.ranks=1", "train.steps=3", "hydra.run.dir=run")
    command = [sys.executable, str(CHECKOUT / "run.py"), *words]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=tmp_path, env=environment(None), **pipe) as shown:
        assert shown.stdout is not None
        shown.stdout.close()
    assert shown.returncode == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3
    log = (tmp_path / "run" / "ranks" / "rank0.log").read_text()
    assert "rank 0 of 1" in log and "standard output was closed (Broken pipe); the run goes on" in log


@pytest.mark.parametrize(
    "word, fault",
    [
        ("task.module=typo", "task.module=typo: there is no such module"),
        ("data.path=${x}", "data.path=${x}: Interpolation key 'x' not found"),
        ("task.name=${no.such}", "task.name=${no.such}: Interpolation key 'no.such' not found"),
        ("checkpoint.resume=${oc.env:NO_SUCH}", "Environment variable 'NO_SUCH' not found"),
        ("hydra.run.dir=${x}", "hydra.run.dir: Interpolation key 'x' not found"),
    ],
)
def test_a_value_that_names_nothing_is_refused(tmp_path, word, fault):
    done = run_command(word, "launch.ranks=1", cwd=tmp_path)
    assert done.returncode == 2 and fault in done.stderr and "Traceback" not in done.stderr


def test_an_interpolated_value_is_recorded_as_written(tmp_path):
    done = run_command(*FAKE, "launch.ranks=1", "train.seed=${train.steps}", "train.steps=3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = folders(tmp_path)
    assert json.loads((folder / "overrides.json").read_text())["train.seed"] == "${train.steps}"
    assert "seed: 3" in (folder / "config.yaml").read_text()


def test_a_shell_completes_words(tmp_path):
    installed = run_command("-sc", "install=bash", cwd=tmp_path)
    assert installed.returncode == 0 and "complete " in installed.stdout, installed.stderr
    asked = {"COMP_LINE": "run.py zero=stag", "COMP_POINT": "16"}
    found = run_command("-sc", "query=bash", cwd=tmp_path, environment=asked)
    assert found.stdout.split() == ["zero=stage0", "zero=stage1", "zero=stage2", "zero=stage3"], found.stderr


@pytest.mark.parametrize("name, text", [("summary.json", '{"status": "do'), ("heartbeat.json", "")])
def test_a_sweep_names_a_file_that_is_cut(tmp_path, name, text):
    swept = run_command(*FAKE, "-m", "launch.ranks=1", "train.steps=1,2", "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert swept.returncode == 0, swept.stderr
    victim = folders(tmp_path)[0] / name
    victim.write_text(text)
    done = run_command("--config-dir", FAKE[1], "sweep.resume=sweep", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert f"ztk: {victim}: is empty, cut or no JSON; remove it" in done.stderr
    victim.unlink()
    assert run_command("--config-dir", FAKE[1], "sweep.resume=sweep", cwd=tmp_path).returncode == 0


def test_an_interpreter_without_the_packages_names_the_way(tmp_path):
    """`python run.py` outside of the environment, as after an installation without `source .venv/bin/activate`."""
    code = f"import sys; sys.modules['hydra'] = None; sys.path.insert(0, {str(CHECKOUT)!r}); from ztk.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=WAITING)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "has no package hydra: activate the environment" in done.stderr and "pip install -e ." in done.stderr
