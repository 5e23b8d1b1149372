"""A sweep killed with SIGKILL at random moments and continued has the digests of an undisturbed one, no row twice, no job twice.

The moments are drawn evenly, at most three jobs after the start. Every kill but the first hits a sweep that continues a killed one. When all
jobs are done, another sweep begins, up to 20 kills. The last command of a sweep runs undisturbed, while a second command on the same folder
must be refused. Then:

* every job is done, with the digest and the losses of the undisturbed sweep, bit for bit;
* a job has each of the steps 1, 2, .. once;
* no finished job was started again: its files equal the ones when it was first seen done;
* no process of a killed sweep is left.
"""

import json
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.slow.test_kill_runs import command, processes_of
from ztk.report.sweep import read_sweep

JOBS, STEPS = 12, 6  # a learning rate per job; every second step writes a checkpoint
SPAN_JOBS = 3  # a kill comes before this many jobs would end
END_SECONDS = 10.0  # for the ranks of a killed command


@dataclass(kw_only=True)
class Trial:
    """A sweep that is killed. seen: files of each job when it was first seen done. faults: messages of failed checks."""

    folder: Path
    line: Sequence[str]
    seen: dict[str, dict[str, bytes]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    kills: list[str] = field(default_factory=list)  # the states of the jobs after each

    def begin(self) -> subprocess.Popen:
        """Starts or continues the sweep."""
        place = "sweep.resume" if (self.folder / "sweep.json").exists() else "hydra.sweep.dir"
        words = [*self.line, f"{place}={self.folder}"] if place == "hydra.sweep.dir" else [f"{place}={self.folder}"]
        return command(words, log=self.folder.with_suffix(".log"))

    def kill(self, process: subprocess.Popen, *, after: float) -> bool:
        """Sends SIGKILL after `after` seconds and checks the remaining processes. Returns False if the sweep had ended before."""
        has_ended = True
        try:
            process.wait(timeout=after)
        except subprocess.TimeoutExpired:
            has_ended = False
            process.send_signal(signal.SIGKILL)
            process.wait()
            self.kills.append(
                " ".join(f"{count} {state}" for state, count in sorted(self.states().items())) or "before sweep.json"
            )
        left = processes_of(self.folder, seconds=END_SECONDS)
        self.faults += [f"still runs after the kill: {line}" for line in left]
        self.look()
        return not has_ended

    def states(self) -> dict[str, int]:
        record = read_sweep(self.folder)
        found = [] if record is None else [state.value for state in record.statuses(self.folder).values()]
        return {state: found.count(state) for state in set(found)}

    def look(self) -> None:
        """Records the files of finished jobs. Files of jobs that were done before must not change."""
        for job, now in done_jobs(self.folder).items():
            before = self.seen.setdefault(job, now)
            if before != now:
                changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
                self.faults.append(f"job {job} was done and has changed: {', '.join(changed)}")

    def finish(self) -> None:
        """Runs the sweep to its end. Meanwhile a second command must be refused."""
        process = self.begin()
        while process.poll() is None and not processes_of(self.folder, word="ztk.worker"):
            time.sleep(0.02)
        if process.poll() is None:
            second = command([f"sweep.resume={self.folder}"], log=self.folder.with_suffix(".second.log"))
            refused = (
                second.wait() == 2
                and "another command runs this sweep" in self.folder.with_suffix(".second.log").read_text()
            )
            overlapped = process.poll() is None
            if overlapped and not refused:
                self.faults.append(f"a second command on the folder was not refused: code {second.returncode}")
        if process.wait() != 0:
            self.faults.append(
                f"the last command ended with code {process.returncode}, see {self.folder.with_suffix('.log')}"
            )
        self.look()


def done_jobs(folder: Path) -> dict[str, dict[str, bytes]]:
    """Finished job -> name and content of its files without checkpoints."""
    found = {}
    for summary in folder.glob("*/summary.json"):
        if json.loads(summary.read_text())["status"] == "done":
            files = (path for path in sorted(summary.parent.rglob("*")) if path.is_file())
            found[summary.parent.name] = {
                str(path.relative_to(summary.parent)): path.read_bytes()
                for path in files
                if "checkpoints" not in path.parts
            }
    return found


def numbers(files: dict[str, bytes]) -> tuple[str, list[tuple[int, float]]]:
    """Returns the digest, and step and loss of every row."""
    rows = [json.loads(line) for line in files["metrics.jsonl"].decode().splitlines()]
    return json.loads(files["summary.json"])["loss_digest"], [(row["step"], row["loss"]) for row in rows]


def compare(trial: Trial, *, undisturbed: Path) -> None:
    """Compares every job with the undisturbed one."""
    expected, found = done_jobs(undisturbed), done_jobs(trial.folder)
    if len(expected) != JOBS or expected.keys() != found.keys():
        trial.faults.append(f"{len(found)} of {JOBS} jobs are done; undisturbed {len(expected)}")
    for job in expected.keys() & found.keys():
        (digest, rows), (own_digest, own_rows) = numbers(expected[job]), numbers(found[job])
        if [step for step, _ in own_rows] != list(range(1, STEPS + 1)):
            trial.faults.append(f"job {job} has rows of the steps {[step for step, _ in own_rows]}")
        if own_digest != digest or own_rows != rows:
            trial.faults.append(f"job {job} has other losses than undisturbed: {own_digest[:12]}, {digest[:12]}")


def test_killed_sweeps_end_as_an_undisturbed_one(tmp_path, show, amount):
    line = (
        *("-m", "model=nano", "data=synthetic", "data.seq_len=32", "train.micro_batch_size=1", "zero=stage1"),
        *("launch.ranks=1", "logger=disabled", "checkpoint=periodic", "checkpoint.every=2", "sweep.quick=true"),
        *(f"train.steps={STEPS}", f"optimizer.lr={','.join(f'{(job + 1) * 1e-3:g}' for job in range(JOBS))}"),
    )
    undisturbed, begun = tmp_path / "undisturbed", time.monotonic()
    process = command([*line, f"hydra.sweep.dir={undisturbed}"], log=tmp_path / "undisturbed.log")
    while process.poll() is None and not any(undisturbed.glob("*/metrics.jsonl")):
        time.sleep(0.02)
    start = time.monotonic() - begun
    assert process.wait() == 0, (tmp_path / "undisturbed.log").read_text()[-2000:]
    per_job = (time.monotonic() - begun - start) / JOBS

    chance, trials = random.Random(0), list[Trial]()
    while (kills := sum(len(trial.kills) for trial in trials)) < amount(20):
        trial = Trial(folder=tmp_path / f"killed{len(trials)}", line=line)
        trials.append(trial)
        while kills + len(trial.kills) < amount(20) and len(trial.seen) < JOBS:
            moment = chance.uniform(0.2, start + min(JOBS - len(trial.seen), SPAN_JOBS) * per_job)
            if trial.kill(trial.begin(), after=moment):
                show(f"kill after {moment:.1f} s: {trial.kills[-1]}")
        trial.finish()
        compare(trial, undisturbed=undisturbed)
        assert not trial.faults
