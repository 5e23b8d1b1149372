"""wandb beside a run: offline files, no prompt, and no way to stop a run."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.policies import run_name
from ztk.report.tracker import TrackerPolicy, WandbTracker

ROW = {"step": 1, "loss": 2.0, "memory.device_bytes": 5}
SCRIPT = """
import sys
from ztk.report.tracker import TrackerPolicy, WandbTracker
policy = TrackerPolicy(mode=sys.argv[1], group="g", name="n", job_type="pretrain", config={"a": {"b": 1}})
tracker = WandbTracker(policy, directory=sys.argv[2])
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
        def log(self, *_, **__):
            raise OSError("no space")

    monkeypatch.setattr(WandbTracker, "_start", lambda self, *_, **__: setattr(self, "_run", Broken()))
    tracker = WandbTracker(TrackerPolicy(), directory=tmp_path)
    tracker.row(ROW)
    assert tracker.notice == "wandb: off for the rest of this run (OSError: no space)"
    tracker.notice = None
    tracker.row(ROW)
    tracker.finish(json.loads("{}"), failed=True)
    assert tracker.notice is None


def test_a_run_continues_without_wandb(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "wandb: off" in WandbTracker(TrackerPolicy(), directory=tmp_path).notice


def test_a_run_is_named_by_what_its_command_line_says(tmp_path):
    folder = tmp_path / "3"
    folder.mkdir()
    assert run_name(folder) == "3"
    (folder / "overrides.json").write_text(json.dumps({"zero": "stage3", "optimizer.lr": "1e-3"}))
    assert run_name(folder) == "zero=stage3 lr=1e-3"
