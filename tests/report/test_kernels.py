"""`kernel.NAME.*` in rows, the summary and the table at the end."""

import json

import pytest
import torch

from tests.report.test_report import Metrics, alone, make_gauges, rows_of
from ztk import kernels
from ztk.kernels import Ceilings
from ztk.kernels.launch.library import get_watch
from ztk.report import KernelPolicy
from ztk.report.kernels import FIELDS, KernelLog
from ztk.report.reporter import Reporter, ReportPolicy

X, WEIGHT = torch.ones(64, 64), torch.ones(64)


def made(folder, *, every: int = 2, ceilings: Ceilings | None = None, **options) -> Reporter:
    policy = ReportPolicy(
        folder=str(folder), total_steps=5, draws=False, kernels=KernelPolicy(every=every, ceilings=ceilings)
    )
    return Reporter(policy, gauges=make_gauges(), comm=alone(), parameters=1000, **options)


def step(reporter: Reporter, *, calls: int = 1, aside: int = 0) -> None:
    for _ in range(calls):
        kernels.rms_norm(X, WEIGHT)
    with reporter.aside():
        for _ in range(aside):
            kernels.rms_norm(X, WEIGHT)
    reporter.step(loss=torch.tensor(1.0), tokens=1, metrics=Metrics)


def test_timed_steps_have_the_keys_and_the_end_their_mean(tmp_path, capsys):
    with made(tmp_path, ceilings=Ceilings(memory_bandwidth=1e9)) as reporter:
        for calls in (7, 2, 7, 4, 7):
            step(reporter, calls=calls, aside=3)
        summary = reporter.finish()
    assert get_watch() is None
    keys = {f"kernel.rms_norm.{field}" for field in FIELDS}
    found = {row["step"]: {key for key in row if key.startswith("kernel.")} for row in rows_of(tmp_path)}
    assert found == {1: set(), 2: keys, 3: set(), 4: keys, 5: set()}
    rows = {row["step"]: row for row in rows_of(tmp_path)}
    moved = 2 * X.nbytes + WEIGHT.nbytes + 64 * 4
    for number, calls in ((2, 2), (4, 4)):
        ms, rate, share = (rows[number][f"kernel.rms_norm.{name}"] for name in ("ms", "gb_per_s", "share_of_floor"))
        assert rows[number]["kernel.rms_norm.calls"] == calls
        assert rate == pytest.approx(calls * moved / ms * 1e3 / 1e9)
        assert share == pytest.approx(calls * moved / 1e9 / ms * 1e3)
    assert summary["kernel.rms_norm.calls"] == 3.0
    assert summary["kernel.rms_norm.ms"] == pytest.approx(
        (rows[2]["kernel.rms_norm.ms"] + rows[4]["kernel.rms_norm.ms"]) / 2
    )
    assert json.loads((tmp_path / "summary.json").read_text())["kernel.rms_norm.calls"] == 3.0
    printed = capsys.readouterr().out
    assert "kernels (mean of the timed steps)" in printed and "rms_norm" in printed and "share of floor" in printed


def test_nothing_where_it_is_off(tmp_path, capsys):
    with made(tmp_path, every=0) as reporter:
        for _ in range(5):
            assert get_watch() is None
            step(reporter)
        summary = reporter.finish()
    assert not [key for row in (summary, *rows_of(tmp_path)) for key in row if key.startswith("kernel.")]
    assert "kernels (" not in capsys.readouterr().out


def test_an_unknown_device_has_no_share(tmp_path):
    with made(tmp_path) as reporter:
        step(reporter)
        step(reporter)
    row = rows_of(tmp_path)[-1]
    assert "kernel.rms_norm.gb_per_s" in row and "kernel.rms_norm.share_of_floor" not in row


def test_an_error_ends_the_timing(tmp_path):
    with pytest.raises(KeyError), made(tmp_path, every=1):
        assert get_watch() is not None
        raise KeyError("broken")
    assert get_watch() is None


def test_each_op_is_that_of_the_slowest_rank():
    """All numbers of an op come from one rank. Ops of other ranks are included."""

    def two_ranks(own: torch.Tensor) -> torch.Tensor:
        other = own.view(-1, 4).clone()
        names = kernels.op_names()
        other[names.index("rms_norm")] *= torch.tensor([0.5, 3.0, 1.0, 1.0])  # faster, more calls
        other[names.index("swiglu")] = torch.tensor([2.0, 8.0, 6e9, 1.0])
        return torch.stack([own, other.flatten()])

    log = KernelLog(KernelPolicy(every=1), gather=two_ranks, device=torch.device("cpu"))
    log.begin(1)
    kernels.rms_norm(X, WEIGHT)
    log.end()
    row = log.read()
    log.close()
    assert row["kernel.rms_norm.calls"] == 1 and row["kernel.swiglu.calls"] == 8
    assert (
        row["kernel.swiglu.ms"] == 2000
        and row["kernel.swiglu.gb_per_s"] == 3
        and row["kernel.swiglu.share_of_floor"] == 0.5
    )


def test_negative_steps_are_refused():
    with pytest.raises(ValueError, match="kernels.log_every=-1"):
        KernelPolicy(every=-1)
