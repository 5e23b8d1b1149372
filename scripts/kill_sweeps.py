"""Kills the process of a sweep with SIGKILL at random moments, continues it each time, and compares with an undisturbed sweep.

    python scripts/kill_sweeps.py [--kills 20] [--jobs 12] [--steps 6] [--seed 0] [--folder DIR]

The moments are drawn evenly, at most three jobs after the start. Every kill but the first hits a sweep that continues a killed one. When all
jobs are done, another sweep begins, up to the requested number of kills. The last command of a sweep runs undisturbed, while a second command
on the same folder must be refused. Then:

* every job is done, with the digest and the losses of the undisturbed sweep, bit for bit;
* a job has each of the steps 1, 2, .. once;
* no finished job was started again: its files equal the ones when it was first seen done;
* no process of a killed sweep is left.

Prints the job states after each kill; the exit code is 1 if a check failed.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SPAN_JOBS = 3  # a kill comes before this many jobs would end
END_SECONDS = 10.0  # for the ranks of a killed command


@dataclass(kw_only=True)
class Trial:
    """A sweep that is killed. seen: files of each job when it was first seen done. faults: messages of failed checks."""

    folder: Path
    line: Sequence[str]
    seen: dict[str, dict[str, bytes]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    kills: list[str] = field(default_factory=list)

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
        end = time.monotonic() + END_SECONDS
        while (left := processes_of(self.folder)) and time.monotonic() < end:
            time.sleep(0.05)
        self.faults += [f"still runs after the kill: {line}" for line in left]
        self.look()
        return not has_ended

    def states(self) -> dict[str, int]:
        from ztk.report.sweep import read_sweep

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


def command(words: Sequence[str], *, log: Path) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(log, "a", encoding="utf-8") as file:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "run.py"), *words], env=environment, stdout=file, stderr=file
        )


def processes_of(folder: Path, *, word: str = "") -> list[str]:
    """Command lines of processes with a path below `folder`."""
    found = subprocess.run(["ps", "axww", "-o", "pid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    lines = (line for line in found.splitlines() if f"{folder}{os.sep}" in line and word in line)
    return [line.strip() for line in lines if line.split()[1][0] != "Z"]


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


def compare(trial: Trial, *, undisturbed: Path, jobs: int, steps: int) -> None:
    """Compares every job with the undisturbed one."""
    expected, found = done_jobs(undisturbed), done_jobs(trial.folder)
    if len(expected) != jobs or expected.keys() != found.keys():
        trial.faults.append(f"{len(found)} jobs are done and {jobs} were asked for; undisturbed {len(expected)}")
    for job in expected.keys() & found.keys():
        (digest, rows), (own_digest, own_rows) = numbers(expected[job]), numbers(found[job])
        if [step for step, _ in own_rows] != list(range(1, steps + 1)):
            trial.faults.append(f"job {job} has rows of the steps {[step for step, _ in own_rows]}")
        if own_digest != digest or own_rows != rows:
            trial.faults.append(f"job {job} has other losses than undisturbed: {own_digest[:12]}, {digest[:12]}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=12, help="jobs of the sweep, one learning rate each")
    parser.add_argument("--steps", type=int, default=6, help="steps per job; every second step writes a checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--folder", type=Path, help="folder for the sweeps (default: a temporary one)")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        return kill_often(given, folder=(given.folder or Path(temporary)).absolute())


def kill_often(given: argparse.Namespace, *, folder: Path) -> int:
    """Runs the undisturbed sweep, kills sweeps and compares. Returns the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    rates = ",".join(f"{(number + 1) * 1e-3:g}" for number in range(given.jobs))
    line = (
        *("-m", "model=nano", "data=synthetic", "data.seq_len=32", "train.micro_batch_size=1", "zero=stage1"),
        *("launch.ranks=1", "logger=disabled", "checkpoint=periodic", "checkpoint.every=2", "sweep.quick=true"),
        *(f"train.steps={given.steps}", f"optimizer.lr={rates}"),
    )
    undisturbed = folder / "undisturbed"
    begun = time.monotonic()
    process = command([*line, f"hydra.sweep.dir={undisturbed}"], log=folder / "undisturbed.log")
    while process.poll() is None and not any(undisturbed.glob("*/metrics.jsonl")):
        time.sleep(0.02)
    start = time.monotonic() - begun
    if code := process.wait():
        print(f"the undisturbed sweep ended with code {code}: see {folder / 'undisturbed.log'}")
        return 1
    per_job = (time.monotonic() - begun - start) / given.jobs
    print(f"undisturbed: {given.jobs} jobs, {per_job:.1f} s each after {start:.1f} s for the start", flush=True)

    chance, kills, faults, number = random.Random(given.seed), 0, [], 0
    while kills < given.kills:
        trial, number = Trial(folder=folder / f"killed{number}", line=line), number + 1
        while kills < given.kills and len(trial.seen) < given.jobs:
            left = given.jobs - len(trial.seen)
            moment = chance.uniform(0.2, start + min(left, SPAN_JOBS) * per_job)
            kills += (has_killed := trial.kill(trial.begin(), after=moment))
            if has_killed:
                print(f"kill {kills} after {moment:.1f} s: {trial.kills[-1]}", flush=True)
        trial.finish()
        compare(trial, undisturbed=undisturbed, jobs=given.jobs, steps=given.steps)
        faults += trial.faults
    done = (
        f"{kills} kills of {number} sweeps of {given.jobs} jobs: equal digests, no row twice, no finished job touched"
    )
    print("\n".join(faults) or done)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
