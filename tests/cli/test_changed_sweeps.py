"""A sweep that goes on after an option file, a default or the machine has changed: no folder has two configurations, no job runs twice."""

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.test_run import CHECKOUT
from tests.cli.test_sweep import everything, run, states
from ztk.cli.recorded import check_job, continue_sweep, hash_of_refused, name_job
from ztk.config import Config, ConfigError, Machine, compose, hash_of, job_hash, save
from ztk.report.sweep import SweepRecord

CPU = Machine(gpus=0, cores=2)
NANO = (CHECKOUT / "conf" / "model" / "nano.yaml").read_text()
LINE = ("launch.ranks=1", "train.steps=1", "logger=disabled")


def options(folder: Path, **models: str) -> tuple[str, ...]:
    """A folder of option files with the program of these tests and the models. Returns the flags that name it."""
    shutil.copytree(CHECKOUT / "tests" / "tasks" / "task", folder / "task", dirs_exist_ok=True)
    (folder / "model").mkdir(exist_ok=True)
    for name, text in models.items():
        (folder / "model" / f"{name}.yaml").write_text(text)
    return ("--config-dir", str(folder), "-m", "task=fake")


def layers_of(folder: Path) -> list[int]:
    """As the jobs' recorded configurations say."""
    return sorted(
        int(line.split()[1])
        for path in folder.glob("*/config.yaml")
        for line in path.read_text().splitlines()
        if line.startswith("  layers:")
    )


def test_an_option_file_that_changed_is_named_and_its_old_value_goes_on(tmp_path):
    conf, folder = tmp_path / "conf", tmp_path / "D"
    line = (*options(conf, mine=NANO), "model=mine", "zero=stage0,stage1", *LINE)
    assert run(*line, "hydra.sweep.dir=D", cwd=tmp_path).returncode == 0
    first, second = (job["folder"] for job in json.loads((folder / "sweep.json").read_text())["jobs"])
    shutil.rmtree(folder / second)
    before = everything(folder)

    options(conf, mine=NANO.replace("layers: 2", "layers: 3"))
    refused = run("sweep.resume=D", "trust=true", cwd=tmp_path)
    assert refused.returncode == 2 and everything(folder) == before
    own = "launch.ranks=1 train.steps=1 logger=disabled"
    for words in (
        f"{first} (task=fake model=mine zero=stage0 {own}): model.layers=3 now, and recorded model.layers=2",
        f"{second} (task=fake model=mine zero=stage1",
        "has not started",
        "give the recorded values on the line",
    ):
        assert words in refused.stderr, refused.stderr
    assert run(*line, "sweep.resume=D", "trust=true", cwd=tmp_path).returncode == 2 and everything(folder) == before
    listed = run("sweep.resume=D", "trust=true", "sweep.list=true", cwd=tmp_path)
    assert listed.returncode == 0 and "model.layers=3 now" in listed.stderr and listed.stdout.count("pending") == 1

    goes_on = run(*line, "model.layers=2", "sweep.resume=D", "trust=true", cwd=tmp_path)
    assert goes_on.returncode == 0, goes_on.stderr
    assert states(folder) == ["done", "done"] and layers_of(folder) == [2, 2]
    assert everything(folder / first).items() <= before.items()
    complete = everything(folder)
    assert run("sweep.resume=D", "trust=true", cwd=tmp_path).returncode == 0 and everything(folder) == complete


def test_an_option_file_that_changes_while_a_sweep_runs_starts_no_other_job(tmp_path):
    conf, changed = tmp_path / "conf", NANO.replace("layers: 2", "layers: 3")
    line = (*options(conf, mine=NANO), "model=mine", "zero=stage0,stage1", *LINE, "hydra.sweep.dir=D")
    done = run(*line, cwd=tmp_path, plan={"writes": {str(conf / "model" / "mine.yaml"): changed}})
    assert done.returncode == 1 and states(tmp_path / "D") == ["done", "refused"]
    assert "has another configuration than when the sweep began" in done.stderr
    assert layers_of(tmp_path / "D") == [2]


def test_a_job_that_was_refused_has_one_folder_when_the_cause_is_gone(tmp_path):
    conf, folder = tmp_path / "conf", tmp_path / "D"
    flags = options(conf, mine=NANO, other=NANO.replace("heads: 4", "heads: 5"))
    done = run(*flags, "model=mine,other", *LINE, "hydra.sweep.dir=D", cwd=tmp_path)
    assert done.returncode == 1 and states(folder) == ["done", "refused"]
    old = json.loads((folder / "sweep.json").read_text())["jobs"][1]["folder"]

    options(conf, other=NANO.replace("layers: 2", "layers: 3"))
    again = run("sweep.resume=D", "trust=true", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("rank 0 of 1") == 1 and states(folder) == ["done", "done"]
    jobs = json.loads((folder / "sweep.json").read_text())["jobs"]
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == sorted(job["folder"] for job in jobs)
    assert old in (job["folder"] for job in jobs) and layers_of(folder) == [2, 3]
    complete = everything(folder)
    assert run("sweep.resume=D", "trust=true", cwd=tmp_path).returncode == 0 and everything(folder) == complete


def test_keys_of_the_recorded_grid_count_in_later_jobs(tmp_path):
    line = (*options(tmp_path / "conf"), "launch.ranks=1", "train.steps=1")
    assert run(*line, "launch.threads=1,2", "hydra.sweep.dir=D", cwd=tmp_path).returncode == 0
    for threads in (2, 4, 8):
        done = run(*line, f"launch.threads={threads}", "sweep.resume=D", "trust=true", cwd=tmp_path)
        assert done.returncode == 0 and done.stdout.count("rank 0 of 1") == (threads > 2), done.stderr
    assert states(tmp_path / "D") == ["done"] * 4


def record_of(*jobs, grid: tuple[str, ...] = ("zero",)) -> SweepRecord:
    common = {"command": "", "flags": ("-m",), "words": (), "commit": "abc", "repeats": 1, "repeat_with": "same_seed"}
    return SweepRecord(**common, grid={key: [] for key in grid}, jobs=jobs)


def composed(words: list[str]) -> Config | None:
    try:
        return compose(*words, output_dir="/run", machine=CPU)
    except ConfigError:
        return None


def job_of(*words: str, counted: tuple[str, ...] = ()):
    config = composed(list(words))
    name = hash_of(list(words)) if config is None else job_hash(config, counted=frozenset(counted))
    return name_job(name, overrides=words)


def test_a_key_that_the_grid_has_gained_leaves_recorded_jobs_as_they_are(tmp_path):
    words = ("zero=stage0", "launch.threads=2")
    old = record_of(job_of(*words))
    grid = ("zero", "launch.threads")
    asked = record_of(job_of(*words, counted=grid), job_of("zero=stage0", "launch.threads=1", counted=grid), grid=grid)
    found = continue_sweep(old, asked=asked, folder=tmp_path, compose=composed)
    assert not found.faults and found.record.jobs == (*old.jobs, asked.jobs[1])
    again = continue_sweep(found.record, asked=asked, folder=tmp_path, compose=composed)
    assert not again.faults and again.record.jobs == found.record.jobs


def test_a_recorded_job_that_is_refused_now_stays_alone(tmp_path):
    job = job_of("zero=stage0")
    asked = record_of(name_job(hash_of_refused(job), overrides=job.overrides))
    found = continue_sweep(record_of(job), asked=asked, folder=tmp_path, compose=lambda words: None)
    assert not found.faults and found.record.jobs == (job,)


def test_a_job_is_compared_with_the_record_when_it_starts(tmp_path):
    job = job_of("zero=stage0")
    record_of(job).write(tmp_path)
    config = composed(["zero=stage0"])
    check_job(config, folder=tmp_path / job.folder)
    check_job(config, folder=tmp_path / "a run outside the sweep")
    config.train.seed += 1
    with pytest.raises(ConfigError, match="another configuration than when the sweep began"):
        check_job(config, folder=tmp_path / job.folder)


def test_a_folder_with_a_run_of_another_name_is_said(tmp_path):
    job = name_job("0123456789ab", overrides=("zero=stage0",))
    (tmp_path / job.folder).mkdir()
    save(composed(["zero=stage0"]), path=tmp_path / job.folder / "config.yaml")
    found = continue_sweep(record_of(job), asked=record_of(), folder=tmp_path, compose=composed)
    assert "has a run of another configuration" in found.faults[0] and "another folder" in found.faults[-1]
