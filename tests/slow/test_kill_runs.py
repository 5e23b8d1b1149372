"""Ctrl-C or SIGTERM at any moment saves the running step, and the printed line resumes to the digest of an undisturbed run.

A run is killed and continued until it is done; then the next one starts, up to 100 kills over all kinds. After every kill:

* the exit code is 130 (SIGINT) or 143 (SIGTERM) within `END_SECONDS`, and no process of the run is left;
* the run's newest checkpoint has the last step of its record; it may be missing only before the end of the first step;
* the command has printed the line that continues the run or the sweep. The test executes that line next.

At the end the digest equals the undisturbed run's, and every step has one row. One kill in five is drawn over the time of a start, the others
over the remaining steps. tests/cli/test_interrupted.py makes two kills, with forks for commands.
"""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import commands
from tests.ranks import forkserver

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
END_SECONDS = 20.0
START_SHARE = 0.2  # share of kills during a start
_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
_MODEL = ("model=nano", "launch.threads=1", "logger=disabled", "train.log_every=1")
_TOKENS = (*_MODEL, "data=synthetic", "data.seq_len=32", "train.micro_batch_size=1", "train.quick=true")
_ROLLOUTS = (
    *("task=grpo", "model.layers=2", "model.dim=32", "model.heads=2", "model.kv_heads=1", "model.hidden_dim=64"),
    *("rollout.prompts=4", "rollout.group_size=4", "rollout.max_tokens=6", "data.seq_len=12"),
    *("train.global_batch_size=8", "train.micro_batch_size=4", "scheduler=constant", "scheduler.warmup_steps=0"),
    *("warm_start.steps=30", "warm_start.batch_size=16", "warm_start.lr=0.01", "logger=disabled", "launch.threads=1"),
)
KINDS: dict[str, tuple[str, ...]] = {
    "train": (*_TOKENS, "launch.ranks=1", "train.steps=40", "checkpoint.every=15"),
    "ranks": (
        *_TOKENS,
        "launch.ranks=2",
        "train.steps=40",
        "zero=stage3",
        "offload=nvme",
        "offload.buffer_bytes=1048576",
    ),
    "grpo": (*_ROLLOUTS, "launch.ranks=1", "train.steps=12"),
    "sweep": ("-m", *_TOKENS, "launch.ranks=1", "train.steps=30", "optimizer.lr=1e-3,2e-3"),
}


@dataclass(kw_only=True)
class Command:
    """A started `run.py`. code: its exit code, None while it runs."""

    process: Any
    log: Path

    @property
    def code(self) -> int | None:
        if isinstance(self.process, subprocess.Popen):
            return self.process.poll()
        return self.process.exitcode

    def wait(self, seconds: float) -> int | None:
        end = time.monotonic() + seconds
        while self.code is None and time.monotonic() < end:
            time.sleep(0.01)
        return self.code

    def printed(self) -> str:
        files = (
            [self.log] if isinstance(self.process, subprocess.Popen) else [self.log, self.log.with_suffix(".stderr")]
        )
        return "".join(file.read_text() for file in files)


def command(words: Sequence[str], *, log: Path) -> subprocess.Popen:
    """Starts `python run.py WORDS`. Its output is appended to `log`."""
    line = [sys.executable, str(ROOT / "run.py"), *words]
    with open(log, "a", encoding="utf-8") as file:
        return subprocess.Popen(line, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def start(words: Sequence[str], *, log: Path, forks: bool) -> Command:
    """Starts `python run.py WORDS` with its output in `log`. forks: as a fork of an interpreter that has imported torch."""
    log.unlink(missing_ok=True)
    if not forks:
        return Command(process=command(words, log=log), log=log)
    files = [log, log.with_suffix(".stderr")]
    for file in files:
        file.unlink(missing_ok=True)
        file.touch()
    told = {"arguments": tuple(words), "cwd": os.getcwd(), "environment": ENVIRONMENT, "files": list(map(str, files))}
    process = forkserver().Process(target=commands._command, kwargs=told)
    process.start()
    while ignores(
        process.pid, number=signal.SIGINT
    ):  # as the interpreter that forks does, until the fork has its own handlers
        time.sleep(0.001)
    return Command(process=process, log=log)


def ignores(pid: int, *, number: int) -> bool:
    """Whether a running process ignores a signal. False if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


@dataclass(kw_only=True)
class Trial:
    """A run or a sweep that is killed repeatedly. faults: messages of failed checks."""

    kind: str
    folder: Path
    forks: bool
    chance: random.Random
    faults: list[str] = field(default_factory=list)
    line: list[str] = field(default_factory=list)
    slowest: float = 0.0  # seconds from a signal to the end
    has_ended: bool = False  # without a kill

    def __post_init__(self) -> None:
        self.line = first_line(self.kind, folder=self.folder)

    def kill(self, *, start_seconds: float) -> bool:
        """Starts or continues the run and kills it once. Returns False if it had ended before."""
        before = steps_made(self.folder)
        running = start(self.line, log=self.folder.with_suffix(".log"), forks=self.forks)
        in_start = self.chance.random() < START_SHARE
        left = max(1, total_steps(self.kind) * (1 + (self.kind == "sweep")) - before)
        wanted = before + (0 if in_start else self.chance.randint(1, left))
        pause = self.chance.uniform(0, start_seconds if in_start else 0.1)
        while running.code is None and steps_made(self.folder) < wanted:
            time.sleep(0.002)
        if running.wait(pause) is not None:
            self.has_ended = running.code == 0
            if running.code != 0:
                self.faults.append(f"{self.folder}: ended with code {running.code}: {running.printed()[-600:]}")
            return False
        number = self.chance.choice(list(_CODES))
        os.kill(running.process.pid, number)
        sent = time.monotonic()
        code = running.wait(END_SECONDS)
        seconds = time.monotonic() - sent
        if code is None:
            os.kill(running.process.pid, signal.SIGKILL)
            self.faults.append(f"{self.folder}: still runs {END_SECONDS} s after {number.name}")
            return True
        if code == 0:
            self.has_ended = True
            return False
        self._check(running, number=number, before=before)
        self.slowest = max(self.slowest, seconds)
        return True

    def _check(self, running: Command, *, number: signal.Signals, before: int) -> None:
        where = f"{self.folder} after {number.name}"
        printed = running.printed()
        has_begun = running.code != -number and "before a run started" not in printed
        if has_begun and running.code != _CODES[number]:
            self.faults.append(f"{where}: code {running.code}: {printed[-600:]}")
        if not has_begun and steps_made(self.folder) != before:
            self.faults.append(f"{where}: made steps, and printed {printed[-600:]}")
        self.faults += [f"{where}: still runs: {line}" for line in processes_of(self.folder, seconds=2.0)]
        for job in jobs_of(self.folder):
            rows, saved = steps_of(job), newest_of(job)
            if rows and (saved is None or saved < rows[-1]):
                self.faults.append(f"{job}: step {rows[-1]} is complete and the newest checkpoint has step {saved}")
            if rows != list(range(1, len(rows) + 1)):
                self.faults.append(f"{job}: rows of the steps {rows}")
        found = [text for text in printed.splitlines() if "checkpoint.resume=" in text or "sweep.resume=" in text]
        lines = [shlex.split(text.partition("run.py ")[2]) for text in found if "python " in text and "run.py " in text]
        if lines:
            self.line = lines[-1]
        elif has_begun and any(newest_of(job) is not None for job in jobs_of(self.folder)):
            self.faults.append(f"{where}: no line that continues the run: {printed[-600:]}")

    def finish(self, *, undisturbed: Path) -> None:
        """Runs to the end and compares."""
        if not self.has_ended:
            running = start(self.line, log=self.folder.with_suffix(".log"), forks=self.forks)
            if running.wait(300) != 0:
                self.faults.append(
                    f"{self.folder}: the last command ended with {running.code}: {running.printed()[-600:]}"
                )
        found, expected = digests(self.folder), digests(undisturbed)
        if found != expected:
            self.faults.append(f"{self.folder}: digests {found}, undisturbed {expected}")
        for job in jobs_of(self.folder):
            if (rows := steps_of(job)) != list(range(1, total_steps(self.kind) + 1)):
                self.faults.append(f"{job}: rows of the steps {rows}")


def first_line(kind: str, *, folder: Path) -> list[str]:
    """The command line of an undisturbed run."""
    place = "hydra.sweep.dir" if kind == "sweep" else "hydra.run.dir"
    words = [*KINDS[kind], f"{place}={folder}"]
    if kind == "grpo":
        reward = folder.parent / "reward.py"
        reward.write_text("def score(*, answer, **given):\n    return (sum(answer.encode()) % 7) / 7\n")
        words.append(f"reward.function={reward}:score")
    return words


def total_steps(kind: str) -> int:
    return int(next(word.partition("=")[2] for word in KINDS[kind] if word.startswith("train.steps=")))


def jobs_of(folder: Path) -> list[Path]:
    """The run's folder, or the folders of a sweep's started jobs."""
    found = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
    return found or ([folder] if (folder / "metrics.jsonl").exists() else [])


def steps_of(job: Path) -> list[int]:
    """The steps of the complete rows."""
    try:
        lines = (job / "metrics.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line)["step"] for line in lines]


def steps_made(folder: Path) -> int:
    """The steps of the run, or of all jobs of the sweep."""
    return sum(len(steps_of(job)) for job in jobs_of(folder))


def newest_of(job: Path) -> int | None:
    """The step of a run's newest complete checkpoint."""
    found = [
        path.parent.name for path in (job / "checkpoints").glob("step-*/manifest.json") if ".tmp-" not in str(path)
    ]
    return max((int(name.removeprefix("step-").partition(".")[0]) for name in found), default=None)


def digests(folder: Path) -> dict[str, str]:
    """Job -> digest, for finished jobs."""
    found = {}
    for job in jobs_of(folder):
        summary = json.loads((job / "summary.json").read_text()) if (job / "summary.json").exists() else {}
        if summary.get("status") == "done":
            found["" if job == folder else job.name] = summary["loss_digest"]
    return found


def processes_of(folder: Path, *, word: str = "", seconds: float = 0.0) -> list[str]:
    """Command lines of processes with a path below `folder` and `word`. seconds: for them to end in."""
    end = time.monotonic() + seconds
    while True:
        listed = subprocess.run(["ps", "axww", "-o", "stat=,args="], capture_output=True, text=True, check=True).stdout
        lines = [line for line in listed.splitlines() if f"{folder}/" in line and word in line and line[0] != "Z"]
        if not lines or time.monotonic() > end:
            return lines
        time.sleep(0.05)


def kill_often(
    kind: str, *, kills: int, folder: Path, forks: bool = False, show: Callable[[str], None] = print
) -> list[str]:
    """Kills runs of one kind. Returns the faults."""
    undisturbed = folder / "undisturbed"
    began = time.monotonic()
    running = start(first_line(kind, folder=undisturbed), log=undisturbed.with_suffix(".log"), forks=forks)
    while running.code is None and not steps_made(undisturbed):
        time.sleep(0.01)
    start_seconds = time.monotonic() - began
    if running.wait(600) != 0:
        return [f"{kind}: the undisturbed run ended with {running.code}: {running.printed()[-1500:]}"]
    chance, made, trials, faults = random.Random(0), 0, list[Trial](), list[str]()
    while made < kills and not faults:
        trial = Trial(kind=kind, folder=folder / f"killed{len(trials)}", forks=forks, chance=chance)
        trials.append(trial)
        while made < kills and trial.kill(start_seconds=start_seconds) and not trial.faults:
            made += 1
        trial.finish(undisturbed=undisturbed)
        faults += trial.faults
    slowest = max(trial.slowest for trial in trials)
    show(f"{kind}: {made} kills of {len(trials)} runs, which ended within {slowest:.2f} s")
    return faults


@pytest.mark.parametrize("kind", KINDS)
def test_killed_runs_resume_to_the_digest_of_an_undisturbed_run(tmp_path, show, amount, kind):
    assert not kill_often(kind, kills=-(-amount(100) // len(KINDS)), folder=tmp_path, show=show)
