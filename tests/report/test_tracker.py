"""Loggers of a run: wandb's offline files without a prompt, TensorBoard's events, CSV; none can stop a run."""

import csv
import importlib.util
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import run_command
from ztk.config import ConfigError, compose
from ztk.experiments.policies import run_name
from ztk.report import read_rows
from ztk.report.tracker import Tracker, TrackerPolicy

ROW = {"step": 1, "loss": 2.0, "memory.device_bytes": 5}
SCRIPT = """
import sys
from ztk.report.tracker import Tracker, TrackerPolicy
policy = TrackerPolicy(mode=sys.argv[1], group="g", name="n", job_type="pretrain", config={"a": {"b": 1}})
tracker = Tracker(policy, directory=sys.argv[2])
print("notice:", tracker.notice)
for step in range(1, 4):
    if step == 2:
        tracker.texts([{"answer": "abc", "reward": 1.0}, {"answer": "", "reward": None}], step=step)
    tracker.row({"step": step, "loss": 1.0 / step})
tracker.finish({"status": "done"}, failed=False)
print("notice:", tracker.notice)
"""


def run(mode: str, *, folder: Path, **streams) -> subprocess.Popen:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    home = folder / "home"  # no login there
    home.mkdir()
    environment |= {"HOME": str(home), "NETRC": str(home / ".netrc"), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SCRIPT, mode, str(folder)]
    return subprocess.Popen(command, env=environment, text=True, **streams)


def offline_runs(folder: Path) -> list[Path]:
    return list((folder / "wandb").glob("offline-run-*/*.wandb"))


def test_offline_writes_files_below_the_run_folder(tmp_path):
    pytest.importorskip("wandb")
    child = run("offline", folder=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out, _ = child.communicate(timeout=50)
    assert child.returncode == 0 and out == "notice: None\nnotice: None\n", out
    (file,) = offline_runs(tmp_path)
    assert file.stat().st_size > 100
    (table,) = file.parent.glob("files/media/table/samples_*.table.json")
    assert json.loads(table.read_text()) == {"columns": ["answer", "reward"], "data": [["abc", 1.0], ["", None]]}


def test_online_without_login_goes_offline_without_a_prompt_even_at_a_terminal(tmp_path):
    pytest.importorskip("wandb")
    terminal, end = pty.openpty()
    child = run("online", folder=tmp_path, stdin=end, stdout=subprocess.PIPE, stderr=end)
    out, _ = child.communicate(timeout=50)  # a prompt would wait for ever
    os.close(end)
    os.close(terminal)
    assert child.returncode == 0
    assert "not logged in" in out
    assert offline_runs(tmp_path)


def test_a_run_continues_without_a_broken_tracker(tmp_path, monkeypatch):
    class Broken:
        notice = None

        def row(self, row):
            raise OSError("no space")

    monkeypatch.setattr("ztk.report.tracker._opened", lambda *_, **__: Broken())
    tracker = Tracker(TrackerPolicy(), directory=str(tmp_path))
    tracker.row(ROW)
    assert tracker.notice == "wandb: off for the rest of this run (OSError: no space)"
    tracker.notice = None
    tracker.row(ROW)
    tracker.finish(json.loads("{}"), failed=True)
    assert tracker.notice is None


def test_a_run_continues_without_wandb(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "ztk.report.tracker", raising=False)
    assert "wandb: off" in Tracker(TrackerPolicy(), directory=str(tmp_path)).notice


def csv_rows(file: Path) -> list[dict[str, float | None]]:
    """Numbers; None where a row has none."""
    with open(file, newline="") as opened:
        return [{key: float(value) if value else None for key, value in row.items()} for row in csv.DictReader(opened)]


def same_rows(found: list[dict], *, folder: Path) -> bool:
    """Whether they are the rows of the run folder, with None for the keys that a row lacks."""
    rows = list(read_rows(folder))
    keys = dict.fromkeys(key for row in rows for key in row)
    return found == [{key: row.get(key) for key in keys} for row in rows]


def test_csv_has_the_rows_of_the_run_also_after_it_was_resumed(tmp_path):
    words = (*RUN, "logger=csv", "train.eval_every=2", "checkpoint=periodic", "checkpoint.every=2")
    train(*words, "train.steps=3", folder=tmp_path / "run")
    assert same_rows(csv_rows(tmp_path / "run" / "metrics.csv"), folder=tmp_path / "run")
    before = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    # A row of a step that will be made again, as after a kill, and one that was cut.
    with open(tmp_path / "run" / "metrics.csv", "a") as file:
        file.write(before[-1].replace("3,", "4,", 1) + "\n5,1.2")
    train(*words, "train.steps=5", "checkpoint.resume=auto", folder=tmp_path / "run")
    rows = csv_rows(tmp_path / "run" / "metrics.csv")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert same_rows(rows, folder=tmp_path / "run")
    assert rows[1]["validation_loss"] is not None and rows[2]["validation_loss"] is None


def test_csv_has_samples_with_their_steps(tmp_path):
    tracker = Tracker(TrackerPolicy(mode="csv"), directory=str(tmp_path))
    tracker.texts([{"answer": 'a "b",\nc', "reward": 1.0}], step=2)
    tracker.texts([{"answer": "", "reward": None}], step=4)
    tracker.finish({}, failed=False)
    assert tracker.notice is None
    with open(tmp_path / "samples.csv", newline="") as file:
        assert list(csv.DictReader(file)) == [
            {"step": "2", "answer": 'a "b",\nc', "reward": "1.0"},
            {"step": "4", "answer": "", "reward": ""},
        ]
    tracker = Tracker(TrackerPolicy(mode="csv"), directory=str(tmp_path), first_step=3)
    with open(tmp_path / "samples.csv", newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["2"]


def test_tensorboard_has_the_rows_of_the_run_also_after_it_was_resumed(tmp_path):
    pytest.importorskip("tensorboard")
    words = (*RUN, "logger=tensorboard", "train.eval_every=2", "checkpoint=periodic", "checkpoint.every=2")
    train(*words, "train.steps=3", folder=tmp_path / "run")
    tracker = Tracker(TrackerPolicy(mode="tensorboard"), directory=str(tmp_path / "run"), first_step=3)
    tracker.row({"step": 4, "loss": 9.0})  # of a step that will be made again, as after a kill
    tracker.finish({"steps": 4}, failed=True)
    train(*words, "train.steps=5", "checkpoint.resume=auto", folder=tmp_path / "run")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    rows = list(read_rows(tmp_path / "run"))
    keys = {key for row in rows for key in row} - {"step"}
    assert set(events.Tags()["scalars"]) == keys
    for key in keys:
        expected = [(row["step"], pytest.approx(row[key])) for row in rows if row.get(key) is not None]
        assert [(event.step, event.value) for event in events.Scalars(key)] == expected, key
    assert "summary/text_summary" in events.Tags()["tensors"]


def test_a_logger_whose_package_is_missing_is_refused(tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "tensorboard" else real(name, *more)
    )
    with pytest.raises(ConfigError, match=r"pip install \"ztk\[tensorboard\]\""):
        compose("model=nano", "data=synthetic", "logger=tensorboard", output_dir=str(tmp_path))


RUN = (
    "model=nano",
    "data.seq_len=16",
    "train.micro_batch_size=1",
    "train.eval_batches=1",
    "launch.ranks=1",
    "launch.device=cpu",
)


def train(*words: str, folder: Path) -> None:
    done = run_command(*words, f"hydra.run.dir={folder}", cwd=folder.parent)
    assert done.returncode == 0 and "off for the rest" not in done.stdout, done.stdout + done.stderr


def test_a_run_is_named_by_its_command_line(tmp_path):
    folder = tmp_path / "3"
    folder.mkdir()
    assert run_name(folder) == "3"
    (folder / "overrides.json").write_text(json.dumps({"zero": "stage3", "optimizer.lr": "1e-3"}))
    assert run_name(folder) == "zero=stage3 lr=1e-3"
