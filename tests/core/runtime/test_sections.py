"""A part of a run that takes too long ends on every rank with an error that names ranks, hosts and stacks."""

import ctypes
import json
import os
import subprocess
import threading
import time

import pytest

from tests.commands import run_command
from tests.ranks import RankPool
from ztk.core.policies import machine
from ztk.core.runtime import Process
from ztk.core.runtime.sections import (
    SAVE,
    SETUP,
    STEP,
    SectionOverrun,
    _Watcher,
    end_overruns_by,
    section,
    watch_sections,
)


def overrun(process: Process, *, limit: float, hang, inner: str = "") -> SectionOverrun:
    """The error of a step in which `hang(rank, found)` hangs, on a rank that ends nothing."""
    found: list[SectionOverrun] = []

    machine.set_hosts([f"host-{rank}" for rank in range(process.world_size)])
    end_overruns_by(found.append)
    with watch_sections({STEP: limit, SAVE: 100.0, SETUP: 100.0}, process=process), section(STEP, detail="step 3"):
        hang(process.rank, found)
        process.comm.barrier()
    return found[0] if found else SectionOverrun("")  # a rank that wakes late has left the section


def sleep_on_rank_2(rank: int, found: list) -> None:
    while rank == 2 and not found:
        time.sleep(0.01)


def hold_the_lock_on_rank_1(rank: int, found: list) -> None:
    if rank == 1:
        ctypes.PyDLL(None).sleep(8)


def texts(process: Process, *, limit: float, hang) -> tuple[str, str]:
    started = time.monotonic()
    error = overrun(process, limit=limit, hang=hang)
    assert time.monotonic() - started < 30
    return str(error), error.stacks


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(3)
    yield pool
    pool.close()


def test_the_rank_that_hangs_is_named_with_its_stack(pool):
    results = pool.run(texts, limit=1.0, hang=sleep_on_rank_2)
    assert len(set(results)) == 1  # all ranks have the same error
    message, stacks = results[0]
    assert message.startswith("step 3 took longer than launch.step_seconds=1: ")
    assert "rank 2 on host-2 is at tests/core/runtime/test_sections.py:" in message
    assert "in sleep_on_rank_2; ranks 0, 1 wait for other ranks at tests/core/runtime/test_sections.py:" in message
    assert "rank 2 on host-2:\n" in stacks and "time.sleep(0.01)" in stacks and "barrier" in stacks


def test_a_rank_that_holds_pythons_lock_is_named(pool):
    message, _ = pool.run(texts, limit=1.0, hang=hold_the_lock_on_rank_1)[0]
    assert "rank 1 on host-1 does not answer: its process is stopped" in message
    assert "ranks 0, 2 wait for other ranks at" in message


def watcher_of(monkeypatch, **limits: float | None) -> tuple[_Watcher, list[SectionOverrun]]:
    found: list[SectionOverrun] = []

    monkeypatch.setattr("ztk.core.runtime.sections._ends", [found.append])
    return _Watcher(limits, process=Process.start(device="cpu", timeout_seconds=0.5)), found


def test_inner_sections_and_progress_do_not_count(monkeypatch):
    watcher, found = watcher_of(monkeypatch, setup=0.6, step=0.6, save=100.0)
    for _ in range(3):
        watcher.enter(STEP, detail="a step")
        time.sleep(0.25)
        watcher.enter(SAVE, detail="a save")
        time.sleep(0.5)
        watcher.leave()
        watcher.leave()
        time.sleep(0.25)
    assert not found
    time.sleep(1.0)
    assert [str(error).partition(":")[0] for error in found] == ["setup took longer than launch.setup_seconds=0.6"]
    watcher.close()


def test_an_open_limit_of_steps_follows_the_longest_one(monkeypatch):
    watcher, found = watcher_of(monkeypatch, step=None, save=100.0)
    watcher.enter(STEP, detail="step 2")
    time.sleep(0.2)
    watcher.leave()
    assert watcher._limit(STEP) == pytest.approx(2.0, rel=0.2)  # above the collectives' 0.5 seconds
    watcher.enter(STEP, detail="step 3")
    end = time.monotonic() + 10
    while not found and time.monotonic() < end:
        time.sleep(0.05)
    assert "launch.step_seconds is not set" in str(found[0])
    watcher.close()


def test_a_process_that_was_stopped_has_its_time_back(monkeypatch):
    stops = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -STOP {os.getpid()}; sleep 3; kill -CONT {os.getpid()}"])
    watcher, found = watcher_of(monkeypatch, setup=2.0)
    started = time.monotonic()
    stops.wait()
    assert time.monotonic() - started > 3 and not found
    watcher.close()


def test_without_limits_nothing_is_watched():
    with watch_sections({}, process=Process.start(device="cpu")), section(STEP):
        assert "ztk-sections" not in [thread.name for thread in threading.enumerate()]


HANGS = """
import time

class Hangs:
    def after_step(self, loop, *, loss):
        while loop.step == 3 and loop.engine.process.rank == 1:
            time.sleep(0.1)
"""


def test_a_run_that_hangs_fails_with_the_place(tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    words = ("model=nano", "data=synthetic", "data.seq_len=32", "launch.threads=1", "launch.ranks=2")
    words += ("train.global_batch_size=2", "train.micro_batch_size=1", "train.quick=true", "logger=disabled")
    words += ("callbacks.own._target_=hangs.Hangs", "launch.step_seconds=2", "hydra.run.dir=run")
    done = run_command(*words, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "step 3 took longer than launch.step_seconds=2: rank 1 is at " in done.stderr
    assert "hangs.py:7 in after_step; rank 0 waits for other ranks at ztk/" in done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
