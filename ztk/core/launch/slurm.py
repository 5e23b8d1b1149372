"""Jobs of Slurm and arrays of jobs: the script, its submission, and the state of a job in the queue.

[Note: Requeues] Slurm sends SIGUSR1 before the time limit and SIGTERM before a preemption to the ranks. They save the running step and end
with 128 plus the signal. srun returns the highest code of its tasks, so the script requeues the job for these codes alone: an error of a rank
has code 1, a kill 137. srun must not end the other tasks of a failed one (`--kill-on-bad-exit`): it does so by SIGTERM, and the code would be
the same as after a preemption. Ranks notice a lost one by its connection. After `scancel` no shell is left that could requeue. A job of an
array has a number of its own in SLURM_JOB_ID, so it requeues itself alone.
"""

import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_CODES = "|".join(str(128 + kind) for kind in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM))
_SECONDS = 60  # for an answer of Slurm's controller


class SlurmError(ValueError):
    """Slurm is not there, or has refused a job. The message has its reason and the fix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmJob:
    """A job, or an array of them. command: one task; of an array, by the number of the job. options: sbatch's, in addition to those for signals
    and requeues. setup: shell lines in front of srun. container: words between srun and the command. log: its file, with %j for the number, or
    %A and %a in an array. requeues: how often it may requeue itself. parallel: how many jobs of the array run at once; None: all.
    """

    command: Sequence[str] | Mapping[int, Sequence[str]]
    name: str
    options: Sequence[str]
    cpus_per_task: int | None
    setup: Sequence[str]
    container: str
    log: str
    signal_seconds: int
    requeues: int
    parallel: int | None = None

    def script(self) -> str:
        """The text of the file for sbatch."""
        of_array, chosen = [], ""
        if isinstance(self.command, Mapping):
            most = "" if self.parallel is None else f"%{self.parallel}"
            of_array = [f"--array={','.join(map(str, self.command))}{most}"]
            cases = [f"    {number}) task=({shlex.join(command)}) ;;" for number, command in self.command.items()]
            chosen = "\n".join(['case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac"])
        command = '"${task[@]}"' if isinstance(self.command, Mapping) else shlex.join(self.command)
        options = [
            *(f"--job-name={self.name}", *of_array),
            *(f"--signal=USR1@{self.signal_seconds}", "--requeue", "--open-mode=append"),
            f"--output={_quoted(self.log)}",
            *(() if self.cpus_per_task is None else [f"--cpus-per-task={self.cpus_per_task}"]),
            *self.options,
        ]
        cores = [] if self.cpus_per_task is None else [f"--cpus-per-task={self.cpus_per_task}"]  # srun has not sbatch's
        srun = ["srun", "--kill-on-bad-exit=0", *cores, *filter(None, [self.container]), command]
        return "\n".join(
            [
                "#!/bin/bash",
                *(f"#SBATCH {option}" for option in options),
                *self.setup,
                *filter(None, [chosen]),
                " ".join(srun),
                "code=$?",
                "# The ranks have saved a step after a signal: the job continues from it.",
                f'case "$code" in {_CODES})',
                f'    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {self.requeues} ]; then scontrol requeue "$SLURM_JOB_ID"; fi ;;',
                "esac",
                'exit "$code"',
            ]
        )


def submit(script: Path) -> str:
    """Submits a job and returns its number. Raises SlurmError."""
    if shutil.which("sbatch") is None:
        raise SlurmError(
            "launch=slurm: there is no sbatch on this machine; use a login node of the cluster, or launch.dry_run=true, which prints the job"
        )
    done = _run("sbatch", "--parsable", str(script))
    if done.returncode:
        reason = " ".join(done.stderr.split()).removeprefix("sbatch: error: ")
        raise SlurmError(f"sbatch {script}: {reason or f'ended with code {done.returncode}'}")
    return done.stdout.strip().partition(";")[0]  # NUMBER;CLUSTER on several clusters


def queue_state(number: str) -> str:
    """The state of a job that waits or runs, such as PENDING. Empty for any other, and where Slurm gives no answer."""
    if shutil.which("squeue") is None:
        return ""
    done = _run("squeue", "--noheader", f"--jobs={number}", "--format=%T")
    return "" if done.returncode else done.stdout.strip()


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]}: Slurm gave no answer within {_SECONDS} s; start the command again") from None


def _quoted(text: str) -> str:
    """A value of an #SBATCH line, which has double quotes and no variables."""
    return f'"{text}"' if any(letter.isspace() for letter in text) else text
