"""Faults in the real main job: the first cause is shown, the others stop within seconds, nothing saved is lost."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.commands import run_command

CHECKOUT = Path(__file__).parents[2]
SMALL = ("model.layers=2", "model.dim=64", "model.heads=2", "model.kv_heads=1", "model.hidden_dim=128")
QUICK = (*SMALL, "train.micro_batch_size=2", "data.seq_len=32", "train.eval_every=0", "train.eval_batches=1")
PLAIN = (*QUICK, "scheduler=constant", "scheduler.warmup_steps=0", "logger=disabled", "launch.threads=1")
NVME = ("zero=stage3", "offload=nvme", "offload.buffer_bytes=1048576")


def words_of(*arguments: str, fault: dict | None) -> list[str]:
    planted = ("--config-dir", str(CHECKOUT / "tests" / "tasks"), "task=faulty") if fault else ()
    named = {word.partition("=")[0] for word in arguments}
    return [*planted, *(word for word in PLAIN if word.partition("=")[0] not in named), *arguments]


def run(*arguments: str, cwd: Path, fault: dict | None = None) -> subprocess.CompletedProcess:
    return run_command(*words_of(*arguments, fault=fault), cwd=cwd, environment={"FAULT": json.dumps(fault)})


def folder_of(cwd: Path) -> Path:
    return sorted(file.parent for file in cwd.rglob("overrides.json"))[-1]


def summary_of(cwd: Path) -> dict:
    return json.loads((folder_of(cwd) / "summary.json").read_text())


def assert_all_stopped(folder: Path) -> None:
    for file in folder.glob("pid*"):
        assert not Path("/proc", file.read_text()).exists(), f"{file.name} still runs"


class RankWatch:
    """When each rank's process ended, seconds since 1970, by the name of the file that it left its number in."""

    def __init__(self, cwd: Path) -> None:
        self.ended: dict[str, float] = {}
        self._cwd, self._over = cwd, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        files: dict[str, Path] = {}
        while not self._over.wait(0.02):
            if len(files) < 2:
                files |= {file.name: file for file in self._cwd.rglob("pid*") if file.stat().st_size}
            for name, file in files.items():
                if name not in self.ended and not Path("/proc", file.read_text()).exists():
                    self.ended[name] = time.time()

    def __enter__(self) -> "RankWatch":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.parametrize(
    "where, count", [("forward", 4), ("backward", 9), ("optimizer", 9), ("checkpoint", 3)], ids=lambda value: str(value)
)
def test_a_killed_rank_stops_the_run_and_is_named(tmp_path, where, count):
    fault = {"rank": 1, "where": where, "count": count, "how": "kill"}
    with RankWatch(tmp_path) as ranks:
        done = run(*NVME, "train.steps=500", "checkpoint.every=2", cwd=tmp_path, fault=fault)
    ended = time.time()
    folder = folder_of(tmp_path)
    assert done.returncode == 1
    assert "rank 1 was killed by SIGKILL" in done.stderr
    struck = float((folder / "struck").read_text())
    assert len(ranks.ended) == 2 and max(ranks.ended.values()) - struck < 5
    assert ended - struck < 7  # then the starting process prints and ends
    assert summary_of(tmp_path)["status"] == "failed" and "SIGKILL" in summary_of(tmp_path)["error"]
    assert_all_stopped(folder)
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


def test_what_was_saved_before_a_kill_continues_to_the_same_bits(tmp_path):
    complete, broken, resumed = tmp_path / "complete", tmp_path / "broken", tmp_path / "resumed"
    for folder in (complete, broken, resumed):
        folder.mkdir()
    assert run(*NVME, "train.steps=8", cwd=complete).returncode == 0
    fault = {"rank": 0, "where": "checkpoint", "count": 9, "how": "kill"}
    assert run(*NVME, "train.steps=500", "checkpoint.every=2", cwd=broken, fault=fault).returncode == 1
    options = ("train.steps=8", "checkpoint=last", f"checkpoint.resume={folder_of(broken)}")
    done = run(*NVME, *options, cwd=resumed, fault={"rank": -1})  # the same task
    assert done.returncode == 0, done.stderr
    expected, found = rows(complete), rows(resumed)
    assert 0 < len(found) < len(expected)
    for step, row in found.items():
        assert (row["loss"], row["grad_norm"]) == (expected[step]["loss"], expected[step]["grad_norm"])


def rows(cwd: Path) -> dict[int, dict]:
    lines = (folder_of(cwd) / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def test_an_exception_is_shown_as_itself(tmp_path):
    """The optimizer runs in a thread behind the forward here; its error ends the run all the same."""
    fault = {"rank": 1, "where": "optimizer", "count": 9, "how": "raise"}
    done = run(*NVME, "train.steps=500", cwd=tmp_path, fault=fault)
    assert done.returncode == 1 and "rank 1: ArithmeticError: planted" in done.stderr
    assert_all_stopped(folder_of(tmp_path))


def test_nan_on_one_rank_ends_all_ranks_and_names_a_parameter(tmp_path):
    done = run("train.steps=500", cwd=tmp_path, fault={"rank": 1, "where": "forward", "count": 3, "how": "nan"})
    assert done.returncode == 1
    assert re.search(r"FloatingPointError: step 3: the gradient of [\w.]+ is not finite", done.stderr), done.stderr


def test_an_offload_folder_that_cannot_be_written_is_named_with_its_fix(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    done = run(*NVME, f"offload.nvme_path={tmp_path}/file", "train.steps=2", cwd=tmp_path)
    assert done.returncode in (1, 2) and "offload.nvme_path" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "how, to",
    [
        (signal.SIGINT, "the command"),
        (signal.SIGTERM, "the command"),
        (signal.SIGUSR1, "the command"),
        (signal.SIGUSR2, "a rank"),
    ],
)
def test_an_interrupt_saves_the_step_and_names_the_line_that_resumes(tmp_path, how, to):
    environment = os.environ | {"FAULT": json.dumps({"rank": -1}), "PYTHONPATH": str(CHECKOUT)}
    running = subprocess.Popen(
        [sys.executable, str(CHECKOUT / "run.py"), *words_of(*NVME, "train.steps=100000", fault={"rank": -1})],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 120
    while not any(file.stat().st_size for file in tmp_path.rglob("metrics.jsonl")):
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.1)
    if to == "a rank":
        os.kill(int((folder_of(tmp_path) / "pid1").read_text()), how)
    else:
        running.send_signal(how)
    start = time.monotonic()
    printed = running.communicate(timeout=60)[1].decode()
    assert time.monotonic() - start < 7
    assert running.returncode == (130 if to == "a rank" else 128 + how)
    assert_all_stopped(folder_of(tmp_path))
    assert summary_of(tmp_path)["status"] == "interrupted"
    folder = folder_of(tmp_path)
    last, place = max(rows(tmp_path)), folder.relative_to(tmp_path)
    assert (folder / "checkpoints" / f"step-{last:06d}" / "manifest.json").exists()
    assert f"the checkpoint of step {last} is in" in printed
    assert f"run.py --config-dir {CHECKOUT}/tests/tasks checkpoint.resume={place} hydra.run.dir={place}" in printed
