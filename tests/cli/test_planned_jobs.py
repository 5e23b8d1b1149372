"""Plans of a sweep's jobs: shown in the list, asked before jobs start."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.cli.test_run import FAKE
from tests.commands import run_command
from ztk.cli.jobs import Job, Outcome, exit_code, print_jobs
from ztk.cli.planned_jobs import JobPlan, plan_jobs
from ztk.config import ConfigError, Machine, compose, take_sweep_keys, to_yaml
from ztk.config.sweep import only_resume
from ztk.report.status import Status, read_status

FITS = JobPlan(
    values={"peak_memory.device_bytes": 10**9, "fits": True, "margin_bytes": 5 * 10**9, "step_seconds": 0.25}
)
MISFIT = JobPlan(
    values={"peak_memory.device_bytes": 90 * 10**9, "fits": False, "margin_bytes": -10 * 10**9, "hardware": "h100"}
)
FULL_NODE = JobPlan(values=FITS.values | {"fits": False, "host_margin_bytes": -3 * 10**9, "hardware": "h100"})
UNPLANNED = JobPlan(values={}, reason="task=sft is not planned")


def test_a_job_that_does_not_fit_is_recorded_and_not_started(tmp_path):
    """The other job has a task without plans: it runs."""
    line = (
        *FAKE[:2],
        "-m",
        "task=fake,pretrain",
        "model=7b",
        *("model.layers=5", "model.dim=8192"),  # 3.2B parameters, 51 GB of states
        "launch.ranks=1",
        "train.steps=1",
        "train.micro_batch_size=1",
    )
    done = run_command(
        *line, "data=synthetic", "sweep.skip_misfits=true", "sweep.hardware=a100_40", "hydra.sweep.dir=D", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    jobs = json.loads((tmp_path / "D" / "sweep.json").read_text())["jobs"]
    ran, skipped = (tmp_path / "D" / job["folder"] for job in jobs)
    assert [read_status(folder) for folder in (ran, skipped)] == [Status.done, Status.does_not_fit]
    summary, plan = (json.loads((skipped / name).read_text()) for name in ("summary.json", "plan.json"))
    assert "more than a100_40 has after its reserve" in summary["error"] and plan["fits"] is False
    assert not (skipped / "ranks").exists() and json.loads((skipped / "overrides.json").read_text())["model"] == "7b"
    assert "does not fit," in done.stdout and "not planned: task=fake is not planned" in done.stdout


def test_plans_come_from_the_jobs_configurations(tmp_path):
    machine = Machine(gpus=0, cores=2)
    configs = {
        f"{words}": to_yaml(compose("model=nano", "data.seq_len=64", *words, output_dir=tmp_path, machine=machine))
        for words in (("zero=stage0",), ("zero=stage2",), ("zero=ddp",))
    }
    plans = plan_jobs(configs, hardware=None)
    assert list(plans) == list(configs)
    first, second, peer = plans.values()
    assert first.values["memory.device.optimizer_bytes"] > 1.9 * second.values["memory.device.optimizer_bytes"]
    assert not first.does_not_fit and first.cells[1:] == ("-", "-")
    assert not peer.values and peer.reason == "only ztk's own engine is planned"
    assert plan_jobs({}, hardware="h100") == {}


def test_the_table_has_the_plans():
    plans = (FITS, MISFIT, UNPLANNED)
    jobs = [
        Job(folder=Path("sweep", str(number)), overrides=("a=b",), status=Status.pending, plan=plan)
        for number, plan in enumerate(plans)
    ]
    console = Console(width=200, record=True, file=open("/dev/null", "w"))
    print_jobs(jobs, console=console)
    text = console.export_text()
    for words in ("fits, 5.00 GB", "does not fit, 10.0 GB", "0.25", "not planned: task=sft is not planned"):
        assert words in text
    assert MISFIT.misfit == "does not fit: 10.0 GB more than h100 has after its reserve"
    assert FULL_NODE.cells[1] == "does not fit, 3.00 GB"
    assert (
        FULL_NODE.misfit == "does not fit: 3.00 GB more than the main memory that a node of h100 has after its reserve"
    )


def test_jobs_that_were_left_out_do_not_change_the_exit_code():
    def code(*states: Status) -> int:
        return exit_code([Job(folder=Path("x"), overrides=(), status=state) for state in states])

    assert code(Status.does_not_fit) == code(Status.done, Status.does_not_fit) == Outcome.done
    assert code(Status.failed, Status.does_not_fit) == Outcome.failed


@pytest.mark.parametrize(
    "words, fault",
    [
        (("sweep.skip_misfits=true",), "sweep.skip_misfits=true asks whether jobs fit: add sweep.hardware=h100"),
        (
            ("sweep.hardware=h100",),
            "sweep.hardware=h100 has no effect without sweep.list=true or sweep.skip_misfits=true",
        ),
        (("sweep.list=true", "sweep.hardware=h99"), "sweep.hardware=h99: must be one of a100_40, a100_80, b200"),
        (("sweep.list=true", "sweep.hardware=here"), "sweep.hardware=here: "),
    ],
)
def test_what_has_no_effect_is_refused(words, fault, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        take_sweep_keys(words)
    assert caught.value.faults[0].startswith(fault)


def test_asking_for_plans_changes_no_jobs():
    taken = take_sweep_keys(("sweep.resume=D", "sweep.skip_misfits=true", "sweep.hardware=h100"))
    assert only_resume(taken.options)
