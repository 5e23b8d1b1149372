"""The run folder's contract, and everything that is written into it."""

import json
import math
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from ztk import report
from ztk.core.runtime import MemoryLedger, PhaseClock, Tier
from ztk.core.runtime.comm import Comm
from ztk.core.runtime.comm.counters import CommCounters
from ztk.core.runtime.comm.planned import PlannedComm
from ztk.core.runtime.comm.transport import SingleRankTransport
from ztk.core.runtime.io import IoCounters
from ztk.report.environment import describe_environment, device_name
from ztk.report.folder import write_json
from ztk.report.plot import draw_memory, draw_reward, draw_speed
from ztk.report.reporter import Reporter, ReportPolicy, rank_totals

ROW_KEYS = {
    *("step", "loss", "lr", "grad_norm", "loss_scale", "skipped", "tokens", "tokens_per_second", "step_seconds"),
    "tokens_per_second_per_gpu",
    *(f"memory.{tier}_bytes" for tier in ("device", "host", "nvme")),
    *(
        f"comm.{kind}_bytes"
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ring", "send", "tied", "muon")
    ),
    *("io.read_bytes", "io.write_bytes"),
}
SUMMARY_KEYS = {
    *("status", "error", "steps", "first_loss", "final_loss", "tokens_per_second", "step_seconds_median", "parameters"),
    *("world_size", "loss_digest"),
    *(f"peak_memory.{tier}_bytes" for tier in ("device", "host", "nvme")),
    *(f"seconds.{phase}" for phase in ("forward", "backward", "communication", "optimizer", "io")),
}


@dataclass(frozen=True)
class Metrics:
    lr: float = 3e-4
    grad_norm: float = 1.5
    loss_scale: float = 1.0
    skipped_total: int = 0


def make_gauges() -> report.Gauges:
    return report.Gauges(memory=MemoryLedger(), comm=CommCounters(), clock=PhaseClock(), io=IoCounters())


def alone() -> Comm:
    return Comm(SingleRankTransport(), rank=0, size=1, device=torch.device("cpu"))


def make_reporter(
    folder: Path, *, gauges: report.Gauges | None = None, comm: Comm | None = None, **options
) -> Reporter:
    names = ("every", "total_steps", "tracker", "tracker_every", "plain_seconds", "slowest_every")
    policy = ReportPolicy(folder=str(folder), **{"total_steps": 4} | {k: options.pop(k) for k in names if k in options})
    return Reporter(
        policy,
        **{"parameters": 1000} | options,
        gauges=gauges or make_gauges(),
        comm=comm or alone(),
    )


def train(reporter: Reporter, *, losses: list[float], finish: bool = True) -> dict | None:
    with reporter:
        for loss in losses:
            reporter.step(loss=torch.tensor(loss), tokens=64, metrics=Metrics)
        return reporter.finish() if finish else None


def rows_of(folder: Path) -> list[dict]:
    return list(report.read_rows(folder))


def test_folder_keeps_the_contract(tmp_path):
    train(make_reporter(tmp_path), losses=[4.0, 3.0, 2.5, 2.0])
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(set(row) == ROW_KEYS for row in rows)
    assert [row["tokens"] for row in rows] == [64, 128, 192, 256]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary) >= SUMMARY_KEYS
    assert (summary["status"], summary["error"], summary["steps"]) == ("done", None, 4)
    assert (summary["first_loss"], summary["final_loss"]) == (4.0, 2.0)
    environment = json.loads((tmp_path / "env.json").read_text())
    assert {"python", "torch", "triton", "commit", "device", "world_size"} <= set(environment)


def test_counters_reach_rows_as_bytes_per_step(tmp_path):
    gauges = make_gauges()
    gauges.comm.bytes["all_gather"] = 10**6  # before training: counts for no step
    with make_reporter(tmp_path, gauges=gauges, every=2) as reporter:
        for step in range(1, 5):
            gauges.memory.add(tier=Tier.host, category="optimizer", nbytes=100)
            gauges.comm.bytes["all_gather"] = 10**6 + 300 * step
            gauges.io.read_bytes = 4096 * step
            with reporter.aside():
                gauges.comm.bytes["all_gather"] += 0
            reporter.step(loss=torch.tensor(1.0), tokens=1, metrics=Metrics)
        summary = reporter.finish()
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 4]
    assert [row["comm.all_gather_bytes"] for row in rows] == [300, 300, 300]
    assert [row["io.read_bytes"] for row in rows] == [4096, 4096, 4096]
    assert [row["memory.host_bytes"] for row in rows] == [100, 200, 400]
    assert summary["comm.all_gather_bytes"] == 1200
    assert summary["peak_memory.host_bytes"] == summary["memory.host.optimizer_bytes"] == 400


def test_time_and_traffic_aside_count_for_no_step(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("ztk.report.rows.time.perf_counter", lambda: now[0])
    gauges = make_gauges()
    with make_reporter(tmp_path, gauges=gauges, total_steps=2) as reporter:
        for _ in range(2):
            now[0] += 0.5
            gauges.comm.bytes["all_gather"] = gauges.comm.bytes.get("all_gather", 0) + 8
            with reporter.aside():
                now[0] += 100.0
                gauges.comm.bytes["all_gather"] += 10**6
            reporter.step(loss=torch.tensor(1.0), tokens=64, metrics=Metrics)
        summary = reporter.finish()
    assert [row["step_seconds"] for row in rows_of(tmp_path)] == [0.5, 0.5]
    assert [row["comm.all_gather_bytes"] for row in rows_of(tmp_path)] == [8, 8]
    assert summary["step_seconds_median"] == 0.5
    assert summary["tokens_per_second"] == 128.0


def test_seconds_are_of_one_rank_and_categories_are_of_the_peak():
    """The maxima of phases over ranks do not add up to a rank's time, and memory at the end is not the cause of the peak."""
    ledger = MemoryLedger()
    ledger.add(tier=Tier.device, category="parameters", nbytes=10)
    ledger.add(tier=Tier.device, category="gathered", nbytes=30)
    ledger.remove(tier=Tier.device, category="gathered", nbytes=30)
    holdings = report.Gauges(memory=ledger, comm=CommCounters(), clock=PhaseClock(), io=IoCounters()).holdings()
    flows = [
        {"seconds.forward": 5.0, "seconds.io": 1.0, "io.read_bytes": 3},
        {"seconds.forward": 2.0, "seconds.io": 9.0},
    ]
    totals = rank_totals([holdings | {"flows": flow} for flow in flows])
    assert (totals["seconds.forward"], totals["seconds.io"], totals["io.read_bytes"]) == (2.0, 9.0, 3)
    assert totals["peak_memory.device.gathered_bytes"] == 30 and totals["memory.device.parameters_bytes"] == 10
    peaks = [value for key, value in totals.items() if key.startswith("peak_memory.device.")]
    assert sum(peaks) == totals["peak_memory.device_bytes"] == 40


def test_loss_is_the_mean_over_ranks_and_counters_their_maximum(tmp_path):
    comm = alone()
    comm.size, comm.gather_scalars = 2, lambda values, label: torch.stack([values, values * 3])
    with make_reporter(tmp_path, comm=comm, total_steps=1) as reporter:
        reporter._gauges.memory.add(tier=Tier.device, category="parameters", nbytes=7)
        reporter.step(loss=torch.tensor(1.0), tokens=1, metrics=Metrics)
    (row,) = rows_of(tmp_path)
    assert row["loss"] == 2.0
    assert row["memory.device_bytes"] == 21


def test_digest_sees_one_bit_of_any_step_and_no_row_interval(tmp_path):
    losses = [4.0, 3.0, 2.5, 2.0]
    one_bit = torch.tensor(3.0).view(torch.int32).add(1).view(torch.float32).item()
    digests = [
        train(make_reporter(tmp_path / name, every=every), losses=values)["loss_digest"]
        for name, every, values in (
            ("a", 1, losses),
            ("b", 3, losses),
            ("c", 1, [4.0, one_bit, 2.5, 2.0]),
            ("d", 1, [3.0, 4.0, 2.5, 2.0]),
        )
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_resumed_run_ends_with_the_digest_and_rows_of_an_uninterrupted_one(tmp_path):
    losses = [4.0, 3.0, 2.5, 2.0]
    full = train(make_reporter(tmp_path / "full"), losses=losses)
    first = make_reporter(tmp_path / "cut")
    with first:
        for loss in losses[:2]:
            first.step(loss=torch.tensor(loss), tokens=64, metrics=Metrics)
        saved = json.loads(json.dumps(first.past()))
        first.step(loss=torch.tensor(9.0), tokens=64, metrics=Metrics)  # after the checkpoint: made again
    resumed = train(make_reporter(tmp_path / "cut", first_step=2, **saved), losses=losses[2:])
    assert resumed["loss_digest"] == full["loss_digest"]
    assert resumed["steps"] == 4 and resumed["tokens"] == full["tokens"]
    assert [row["loss"] for row in rows_of(tmp_path / "cut")] == losses


def test_a_run_with_nothing_left_to_do_still_ends_well(tmp_path):
    summary = train(make_reporter(tmp_path, first_step=4, first_tokens=256, digest="ab"), losses=[])
    assert (summary["status"], summary["steps"], summary["loss_digest"]) == ("done", 4, "ab")


def test_a_finished_run_that_is_resumed_keeps_its_record(tmp_path, capsys):
    train(make_reporter(tmp_path), losses=[4.0, 3.0, 2.5, 2.0])
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()}
    reporter = make_reporter(tmp_path, first_step=4, first_tokens=256, digest="ab")
    with reporter:
        reporter.finish(sample="another")
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()} == before
    assert "as it was" in capsys.readouterr().out
    with pytest.raises(RuntimeError), make_reporter(tmp_path, first_step=4):
        raise RuntimeError("later")
    assert (tmp_path / "summary.json").read_bytes() == before[tmp_path / "summary.json"][1]


def test_the_environment_names_the_command_line_of_the_run(monkeypatch):
    monkeypatch.setenv("ZTK_COMMAND", "run.py zero=stage3")
    assert describe_environment(device=torch.device("cpu"), world_size=1)["command"] == "run.py zero=stage3"


@pytest.mark.parametrize(("told", "hosts"), [("a b", ["a", "b"]), ("", [platform.node()] * 2)])
def test_the_environment_has_the_host_of_each_rank(told, hosts, monkeypatch):
    monkeypatch.setenv("ZTK_HOSTS", told)
    assert describe_environment(device=torch.device("cpu"), world_size=2)["hosts"] == hosts


def test_extra_values_make_a_row_and_reach_the_summary(tmp_path):
    with make_reporter(tmp_path, every=100) as reporter:
        for step in range(1, 5):
            extra = {"validation_loss": 2.0} if step == 3 else {}
            reporter.step(loss=torch.tensor(1.0), tokens=1, metrics=Metrics, values=extra)
        summary = reporter.finish(validation_loss=2.0, bigram_entropy=2.3)
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 3, 4]
    assert rows_of(tmp_path)[1]["validation_loss"] == 2.0
    assert summary["bigram_entropy"] == 2.3


def test_metrics_of_the_modules_are_in_rows_and_cause_none(tmp_path):
    asked = []

    def module_metrics():
        asked.append(reporter._rows.step)
        return {"moe.dropped": asked[-1] / 8, "moe.load": {"mlp": [0.5, 0.5]}}

    with make_reporter(tmp_path, every=2) as reporter:
        for _ in range(4):
            reporter.step(loss=torch.tensor(1.0), tokens=1, metrics=Metrics, module_metrics=module_metrics)
        reporter.finish()
    assert asked == [1, 2, 4], "asking is a collective call that waits for the device: once per row"
    assert [(row["moe.dropped"], row["moe.load"]["mlp"]) for row in rows_of(tmp_path)] == [
        (step / 8, [0.5, 0.5]) for step in asked
    ]


def test_failed_run_keeps_its_rows_and_its_reason(tmp_path):
    with pytest.raises(RuntimeError), make_reporter(tmp_path) as reporter:
        reporter.step(loss=torch.tensor(4.0), tokens=1, metrics=Metrics)
        raise RuntimeError("disk full")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["error"], summary["steps"]) == ("failed", "RuntimeError: disk full", 1)
    assert set(summary) >= SUMMARY_KEYS
    assert len(rows_of(tmp_path)) == 1
    report.write_failed_summary(tmp_path, error="rank 1 was killed")  # the parent has the first cause
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["error"], summary["first_loss"], summary["world_size"]) == ("rank 1 was killed", 4.0, 1)


def test_failed_summary_without_a_summary(tmp_path):
    report.write_failed_summary(tmp_path / "nothing", error="no rank started")
    summary = json.loads((tmp_path / "nothing" / "summary.json").read_text())
    assert summary == {"status": "failed", "error": "no rank started", "steps": 0}
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0}\n{"step": 2, "loss": 4.0}\n{"step": 3, "lo')
    report.write_failed_summary(tmp_path, error="killed")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["first_loss"], summary["final_loss"]) == (2, 5.0, 4.0)


def test_failed_summary_needs_no_torch():
    code = "import sys; from ztk.report import write_failed_summary; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_json_is_strict(tmp_path):
    write_json(tmp_path / "a.json", values={"loss": math.nan, "norm": math.inf, "step": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"loss": None, "norm": None, "step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_overflow_and_nan_do_not_stop_the_record(tmp_path, capsys):
    with make_reporter(tmp_path, total_steps=1) as reporter:
        reporter.step(
            loss=torch.tensor(math.nan), tokens=1, metrics=lambda: Metrics(grad_norm=math.inf, loss_scale=2.0)
        )
        reporter.finish()
    (row,) = rows_of(tmp_path)
    assert row["loss"] is None and row["grad_norm"] is None
    assert "scale 2" in capsys.readouterr().out


def test_other_ranks_write_nothing(tmp_path, capsys):
    summary = train(make_reporter(tmp_path / "none", comm=PlannedComm(rank=1, size=2)), losses=[1.0] * 4)
    assert summary["steps"] == 4
    assert not (tmp_path / "none").exists()
    assert capsys.readouterr().out == ""


def test_long_evaluations_print_their_progress(tmp_path, capsys):
    for seconds, lines in ((10.0, []), (0.0, ["held-out loss: 0 of 2 batches", "held-out loss: 1 of 2 batches"])):
        with make_reporter(tmp_path / str(seconds), plain_seconds=seconds) as reporter:
            capsys.readouterr()
            assert list(reporter.follow(["a", "b"], work="held-out loss: {} batches")) == ["a", "b"]
            assert capsys.readouterr().out.splitlines() == lines


def test_plain_output_and_tables(tmp_path, capsys):
    gauges = make_gauges()
    gauges.memory.add(tier=Tier.device, category="parameters", nbytes=2_000_000)
    gauges.memory.add(tier=Tier.nvme, category="optimizer", nbytes=12_000_000)
    with make_reporter(tmp_path, gauges=gauges) as reporter:
        for _ in range(4):
            gauges.io.write_bytes += 10**9
            gauges.io.write_seconds += 0.5
            gauges.comm.bytes["reduce_scatter"] = gauges.comm.bytes.get("reduce_scatter", 0) + 5000
            reporter.step(loss=torch.tensor(2.0), tokens=64, metrics=Metrics)
        reporter.finish()
    out = capsys.readouterr().out
    start = out.partition("\n")[0]
    assert start.startswith("steps 1 to 4, ") and start.endswith(f"parameters on 1 rank, record: {tmp_path}")
    assert "step 1/4" in out and "step 4/4" in out and "step 2/4" not in out
    for text in ("2.00 MB", "12.0 MB", "2.00 GB/s", "5.00 kB", "memory per rank and tier", "seconds per phase"):
        assert text in out, text


def test_picture(tmp_path):
    with make_reporter(tmp_path) as reporter:
        reporter._gauges.memory.add(tier=Tier.device, category="parameters", nbytes=2_000_000)
        for _ in range(4):
            reporter.step(loss=torch.tensor(2.0), tokens=64, metrics=Metrics, values={"validation_loss": 2.5})
        reporter.finish(bigram_entropy=2.2)
    data = (tmp_path / "run.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000
    assert (tmp_path / "run.svg").read_text().lstrip().startswith("<?xml")


def test_no_two_categories_of_the_picture_have_one_colour_and_steps_are_whole_numbers():
    axes = Figure().subplots()
    categories = ("parameters", "gradients", "optimizer", "pool", "checkpoint_staging", "host_copies")
    summary = {f"peak_memory.device.{name}_bytes": 10 for name in categories} | {"peak_memory.device_bytes": 60}
    draw_memory(axes, summary=summary)
    colors = [patch.get_facecolor() for patch in axes.patches]
    assert len(colors) == len(set(colors)) == len(categories)
    axes = Figure().subplots()
    draw_speed(axes, rows=[{"step": step, "tokens_per_second": 5.0} for step in range(1, 4)])
    assert all(float(tick).is_integer() for tick in axes.get_xticks())


def test_rewards_are_drawn_over_the_divergence_or_the_steps():
    rows = [{"step": step, "reward": step / 4, "kl": step / 2} for step in range(1, 4)]
    axes = Figure().subplots()
    draw_reward(axes, rows=rows)
    assert axes.collections[0].get_offsets().tolist() == [[0.5, 0.25], [1.0, 0.5], [1.5, 0.75]]
    axes = Figure().subplots()
    draw_reward(axes, rows=[row | {"kl": None} for row in rows])
    assert axes.collections[0].get_offsets().tolist() == [[1, 0.25], [2, 0.5], [3, 0.75]]
    assert axes.get_xlabel() == "step"
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    draw_reward(axes, rows=[row | {"true_reward": 0.0} for row in rows])
    figure.draw_without_rendering()
    assert axes.get_legend().get_window_extent().y1 < axes.get_window_extent().y0  # below the axes


def test_picture_of_a_run_without_rows(tmp_path):
    report.write_failed_summary(tmp_path, error="too early")
    assert report.plot_run(tmp_path).stat().st_size > 5_000


def test_load_reads_one_run_and_a_sweep(tmp_path):
    for name, stage in (("0", "stage0"), ("1", "stage3")):
        train(make_reporter(tmp_path / name), losses=[4.0, 3.0, 2.5, 2.0])
        (tmp_path / name / "overrides.json").write_text(json.dumps({"zero": stage}))
    report.write_failed_summary(tmp_path / "2", error="killed")
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0}\n')
    runs, history = report.load(tmp_path)
    assert list(runs["run"]) == ["0", "1", "2", "3"]
    assert list(runs["status"]) == ["done", "done", "failed", "dead"]
    assert list(runs["zero"][:2]) == ["stage0", "stage3"]
    assert len(history) == 9 and set(history["run"]) == {"0", "1", "3"}
    assert report.load(tmp_path / "0").runs["run"].item() == "."
    with pytest.raises(ValueError, match="contains no run"):
        report.load(tmp_path / "0" / "nowhere")


@pytest.mark.parametrize("key", ["every", "tracker_every"])
def test_intervals_are_checked(key):
    with pytest.raises(ValueError, match="must be 1 step or more"):
        ReportPolicy(folder=".", total_steps=1, **{key: 0})


def test_an_error_at_the_end_of_a_logger_is_printed(tmp_path, monkeypatch, capsys):
    class Broken:
        notice = None

        def row(self, row):
            pass

        def finish(self, summary, *, failed):
            raise OSError("no space")

    monkeypatch.setattr("ztk.report.tracker._opened", lambda *_, **__: Broken())
    train(make_reporter(tmp_path, tracker=report.TrackerPolicy(mode="csv")), losses=[1.0, 2.0])
    assert "csv: off for the rest of this run (OSError: no space)" in capsys.readouterr().out


def test_unknown_tracker_mode():
    with pytest.raises(ValueError, match="logger.mode=on"):
        report.TrackerPolicy(mode="on")


def test_the_environment_of_a_run_on_a_gpu_has_the_gpus_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert device_name(torch.device("cuda", 1)) == "GPU 1"
