"""The engine's output and files during training, on two ranks."""

import csv
import importlib.machinery
import logging
import re
import sys
import types

import pytest

import ztk.deepspeed as deepspeed
from tests.deepspeed.scripts import BATCH, build, config, loop
from ztk.core.runtime import Process
from ztk.deepspeed.config import DeepSpeedConfigError, parse_config
from ztk.deepspeed.config.watching import FilesPolicy, MonitorPolicy, WandbPolicy
from ztk.deepspeed.watch.monitors import MonitorMaster, get_monitor_config
from ztk.deepspeed.watch.watcher import WallClock


def watched(process: Process, *, steps: int = 4, **more) -> dict[str, object]:
    """Trains, and returns the lines that were logged and the engine's answers."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("ztk.deepspeed")
    logger.addHandler(handler)
    engine, *_ = deepspeed.initialize(model=build(), config=config(stage=2, log_level="info", **more))
    losses = loop(process, engine, steps=steps)
    if engine.monitor.enabled:
        engine.monitor.write_events([("Mine/value", 7.0, 3)])
    found = {"lines": lines, "losses": losses, "timers": engine.get_wall_clock_timers(), "lr": engine.get_lr()[0]}
    engine.destroy()
    logger.removeHandler(handler)
    return found


def test_times_of_every_micro_batch_and_step(ranks):
    first, second = ranks(2).run(watched, accumulation=2, wall_clock_breakdown=True, steps=2)
    assert second["lines"] == []
    lines = [line for line in first["lines"] if line.startswith("time (ms)")]
    micro, full = [line for line in lines if "_microstep" in line], [line for line in lines if "_micro" not in line]
    assert (len(micro), len(full)) == (4, 2)
    names = ["fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"]
    assert re.findall(r"\| (\w+): ", full[0]) == names
    assert re.findall(r"\| (\w+): ", micro[0]) == [f"{name}_microstep" for name in names]
    for found in (first, second):
        timers = found["timers"]
        assert timers["bwd"] == pytest.approx(timers["bwd_inner"] + timers["bwd_allreduce"])
        assert timers["fwd"] > timers["fwd_microstep"] > 0  # two micro-batches
        assert timers["step"] >= timers["step_microstep"] > 0


def test_phases_add_up_over_a_step(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock, engine = WallClock(), {"communication": 0.0}
    for _ in range(2):
        for name in ("fwd", "bwd"):
            with clock.phase(name, phases=engine):
                engine["communication"] += 0.25
    assert clock.micro == {"fwd": 1000, "bwd": 1000, "bwd_inner": 750, "bwd_allreduce": 250}
    assert clock.step == {"fwd": 2000, "bwd": 2000, "bwd_inner": 1500, "bwd_allreduce": 500}
    clock.end_step()
    assert clock.step["fwd"] == 2000  # till the next step begins
    with clock.phase("fwd", phases=engine):
        pass
    assert clock.step == {"fwd": 1000}


def test_progress_with_samples_per_second(ranks):
    lines = ranks(2).run(watched, steps_per_print=2, accumulation=2)[0]["lines"]
    assert [line.split(",")[0] for line in lines if line.startswith("step=")] == ["step=2", "step=4"]
    (speed,) = [line for line in lines if "SamplesPerSec" in line]
    assert speed.startswith("epoch=0/micro_step=8/global_step=4, RunningAvgSamplesPerSec=")
    silent = ranks(2).run(watched, steps_per_print=2, timers={"throughput": {"enabled": False}})[0]["lines"]
    assert not any("SamplesPerSec" in line for line in silent)


def test_memory_of_steps_that_report(ranks):
    lines = ranks(2).run(watched, memory_breakdown=True, steps_per_print=3)[0]["lines"]
    moments = [line for line in lines if line.startswith("Engine after")]
    assert moments == ["Engine after forward", "Engine after backward", "Engine after step"]
    assert sum(line.startswith("CPU virtual memory: used = ") for line in lines) == 3
    assert any(line.startswith("memory: device, optimizer: ") for line in lines)


def test_the_state_is_dumped(ranks):
    first, second = ranks(2).run(watched, dump_state=True, steps=1, comet={"enabled": False, "api_key": "secret"})
    assert "secret" not in str(first["lines"])
    assert first["lines"][0] == "DeepSpeedEngine:" and second["lines"] == []
    assert any(re.match(r"  gradient_clipping \.+ 1\.0", line) for line in first["lines"])


def test_a_profile_is_not_printed_in_silence():
    profiler = {"profile_step": 2, "module_depth": -1, "output_file": "profile.txt"}
    for enabled in (True, False):
        given = {"train_batch_size": 8, "flops_profiler": {"enabled": enabled, **profiler}}
        notes = [note for note in parse_config(given, world_size=2).notes if "flops_profiler" in note]
        assert len(notes) == enabled and all("torch.utils.flop_counter.FlopCounterMode" in note for note in notes)


def read(path) -> list[list[str]]:
    with open(path, newline="") as file:
        return list(csv.reader(file))


def test_csv_files_of_a_run(ranks, tmp_path):
    """One file per event, as DeepSpeed names and fills them, written by rank 0."""
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    first, _ = ranks(2).run(watched, csv_monitor=monitor, wall_clock_breakdown=True, fp16={"enabled": True})
    files = sorted(path.name for path in (tmp_path / "job").iterdir())
    times = [
        f"Train_Samples_elapsed_time_ms_{name}.csv"
        for name in ("backward", "backward_allreduce", "backward_inner", "forward", "step")
    ]
    assert files == [
        "Mine_value.csv",
        *times,
        *(f"Train_Samples_{name}.csv" for name in ("loss_scale", "lr", "train_loss")),
    ]
    rates = read(tmp_path / "job" / "Train_Samples_lr.csv")
    assert rates == [["step", "lr"], *([str(BATCH * n), str(first["lr"])] for n in (1, 2, 3, 4))]
    assert read(tmp_path / "job" / "Mine_value.csv") == [["step", "value"], ["3", "7.0"]]
    scales = read(tmp_path / "job" / "Train_Samples_loss_scale.csv")
    assert scales[1] == [str(BATCH), "65536.0"]
    losses = [float(row[1]) for row in read(tmp_path / "job" / "Train_Samples_train_loss.csv")[1:]]
    assert len(losses) == 4 and losses[-1] < losses[0]


class Recorder:
    """In the place of a library that is not installed."""

    def __init__(self, **options) -> None:
        self.options, self.events, self.closed = options, [], False

    def add_scalar(self, *event) -> None:
        self.events.append(event)

    def log(self, values, step) -> None:
        self.events.append((values, step))

    def flush(self) -> None:
        self.events.append("flush")

    def close(self) -> None:
        self.closed = True

    finish = close


def test_tensorboard(monkeypatch):
    made: list[Recorder] = []
    module = types.SimpleNamespace(SummaryWriter=lambda **options: made.append(Recorder(**options)) or made[-1])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monitor = MonitorMaster(MonitorPolicy(tensorboard=FilesPolicy(output_path="out", job_name="job")))
    monitor.write_events(iter([("a", 1.0, 2), ("b", 2.0, 2)]))
    monitor.close()
    assert made[0].options == {"log_dir": "out/job"} and made[0].closed
    assert made[0].events == [("a", 1.0, 2), ("b", 2.0, 2), "flush"]


def test_wandb_never_asks(monkeypatch):
    made: list[Recorder] = []
    module = types.SimpleNamespace(
        init=lambda **options: made.append(Recorder(**options)) or made[-1], login=lambda prompt: prompt
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    policy = MonitorPolicy(wandb=WandbPolicy(group="g", team="t", project="p"))
    monitor = MonitorMaster(policy)
    monitor.write_events([("a", 1.0, 2)])
    monitor.close()
    assert made[0].options == {"project": "p", "group": "g", "entity": "t", "mode": "offline"} and made[0].closed
    assert made[0].events == [({"a": 1.0}, 2)]
    monkeypatch.setenv("WANDB_API_KEY", "x")
    MonitorMaster(policy)
    assert made[1].options["mode"] is None


def test_comet_gets_a_name_every_so_many_samples(monkeypatch):
    made: list[Recorder] = []

    class Experiment(Recorder):
        def log_metric(self, name, value, step) -> None:
            self.events.append((name, value, step))

        def set_name(self, name) -> None:
            self.events.append(name)

        end = Recorder.close

    module = types.SimpleNamespace(start=lambda **options: made.append(Experiment(**options)) or made[-1])
    module.__spec__ = importlib.machinery.ModuleSpec("comet_ml", None)
    monkeypatch.setitem(sys.modules, "comet_ml", module)
    section = {
        "enabled": True,
        "samples_log_interval": 16,
        "api_key": "secret",
        "experiment_name": "n",
        "online": False,
    }
    policy = get_monitor_config({"comet": section})
    assert "secret" not in repr(policy)  # dump_state prints it
    monitor = MonitorMaster(policy)
    for samples in (8, 16, 24, 32, 40):
        monitor.write_events([("a", samples / 2, samples)])
    monitor.write_events([("b", 1.0, 40)])
    monitor.close()
    (experiment,) = made
    given = {"api_key": "secret", "online": False}
    assert experiment.options == {
        **dict.fromkeys(("project", "workspace", "experiment_key", "mode")),
        **given,
    }
    assert experiment.events == ["n", ("a", 4.0, 8), ("a", 12.0, 24), ("a", 20.0, 40), ("b", 1.0, 40)]
    assert experiment.closed


def test_what_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    given = {name: {"enabled": True} for name in ("tensorboard", "wandb", "comet", "csv_monitor")}
    with pytest.raises(DeepSpeedConfigError) as caught:
        get_monitor_config(given)
    assert caught.value.faults == [
        "tensorboard.enabled: the package tensorboard is not installed; pip install tensorboard, or use csv_monitor",
        "wandb.enabled: the package wandb is not installed; pip install wandb, or use csv_monitor",
        "comet.enabled: the package comet_ml is not installed; pip install comet_ml, or use csv_monitor",
    ]
    off = {name: {"enabled": False} for name in given}
    assert not get_monitor_config(off).enabled and get_monitor_config({"csv_monitor": {"enabled": True}}).enabled


@pytest.mark.parametrize(
    ("section", "part"),
    [
        ({"flops_profiler": {"enabled": "yes"}}, "must be true or false"),
        ({"comms_logger": {"enabled": True, "prof_op": []}}, "did you mean prof_ops"),
        ({"csv_monitor": {"enabled": "yes"}}, "must be true or false"),
        ({"timers": {"throughput": {"sync": True}}}, "timers.throughput.sync: there is no such key"),
        ({"comet": {"enabled": True, "mode": "new"}}, "must be one of get, create"),
    ],
)
def test_wrong_sections(section, part):
    with pytest.raises(DeepSpeedConfigError, match=re.escape(part)):
        parse_config({"train_batch_size": 8, **section}, world_size=2)
