"""The slowest rank, in the row and in a line."""

import contextlib
import io
import json
import os
from unittest import mock

import torch

from tests.report.test_report import Metrics, make_gauges, make_reporter, rows_of
from ztk.core.runtime import Process
from ztk.report.rows import Slowest


def seconds(*ranks: tuple[float, float, float, float]) -> torch.Tensor:
    """Of forward, backward, optimizer and io."""
    return torch.tensor(ranks, dtype=torch.float64)


def test_the_slowest_rank_has_the_most_own_seconds_and_its_phase_the_most_above_the_median():
    found = Slowest.of(seconds((2, 3, 1, 0), (2, 3, 1, 0), (2.5, 5, 1.5, 0), (2, 4, 0, 0)))
    assert found == Slowest(rank=2, ratio=1.5, phase="backward")
    assert Slowest.of(seconds((0, 0, 0, 0), (0, 0, 0, 0))) is None
    assert Slowest.of(seconds((1, 1, 1, 1))) is None


def slow_io(process: Process, *, folder: str) -> None:
    gauges = make_gauges()
    with make_reporter(folder, gauges=gauges, comm=process.comm, total_steps=5, slowest_every=2) as reporter:
        for _ in range(5):
            gauges.clock.seconds["forward"] += 1.0
            gauges.clock.seconds["communication"] += 9.0  # the others wait
            gauges.clock.seconds["io"] += 1.0 if process.rank == 2 else 0.0
            reporter.step(loss=torch.tensor(1.0), tokens=1, metrics=Metrics)
        reporter.finish()


def test_rows_have_the_slowest_rank_and_a_line_names_its_host(ranks, tmp_path):
    printed = ranks(3).run(lines_of, folder=str(tmp_path))
    line = "the slowest rank of the last 2 rows is rank 2 on b: 2.00 times the median's own seconds, most in io"
    assert printed == [[line, line], [], []]
    assert [(row["slowest_rank"], row["slowest_ratio"]) for row in rows_of(tmp_path)] == [(2, 2.0)] * 5
    assert "slowest_ratio" not in json.loads((tmp_path / "summary.json").read_text())


def lines_of(process: Process, *, folder: str) -> list[str]:
    with mock.patch.dict(os.environ, ZTK_HOSTS="a*2 b"), contextlib.redirect_stdout(io.StringIO()) as said:
        slow_io(process, folder=folder)
    return [line for line in said.getvalue().splitlines() if "slowest rank" in line]
