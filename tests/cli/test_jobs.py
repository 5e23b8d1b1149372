"""The table of a sweep and the exit code."""

import io
import json

import pytest
from rich.console import Console

from ztk.cli.jobs import Job, exit_code, print_jobs
from ztk.report.status import Status


def job(folder, state=Status.done, *, overrides=(), **summary) -> Job:
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(summary))
    return Job(folder=folder, overrides=overrides, status=state)


@pytest.mark.parametrize(
    "statuses, code",
    [
        ([], 0),
        ([Status.done], 0),
        ([Status.failed], 1),
        ([Status.refused], 2),
        ([Status.done, Status.refused], 1),
        ([Status.failed, Status.failed], 1),
        ([Status.refused, Status.refused], 2),
        ([Status.done, Status.done], 0),
        ([Status.done, Status.pending], 1),
        ([Status.dead, Status.dead], 1),
        ([Status.done, Status.running], 1),
    ],
)
def test_exit_codes(statuses, code, tmp_path):
    assert exit_code([Job(folder=tmp_path, overrides=(), status=status) for status in statuses]) == code


def test_the_table_has_every_job_and_every_error(tmp_path):
    metrics = {
        "final_loss": 1.25,
        "tokens_per_second": 41234.0,
        "step_seconds_median": 0.5,
        "tokens_per_second_per_gpu": 20617.0,
        "mfu": 0.321,
        "loss_digest": "abcdef0123",
    }
    jobs = [
        job(tmp_path / "0", overrides=("zero=stage0", "seed=1"), **metrics, **{"peak_memory.device_bytes": 2_000_000}),
        job(
            tmp_path / "1", Status.failed, overrides=("zero=stage1", "seed=1"), error="rank 1: [boom]", status="failed"
        ),
    ]
    screen = io.StringIO()
    print_jobs(jobs, console=Console(file=screen, width=160))
    text = screen.getvalue()
    for words in (
        "zero=stage0",
        "1.2500",
        "41.2k",
        "20.6k",
        "MFU",
        "32.1%",
        "2.00 MB",
        "abcdef01",
        "failed",
        "all jobs: seed=1",
    ):
        assert words in text
    assert "job 1: rank 1: [boom]" in text and "HFU" not in text  # no job has it
