"""Ranks started by torchrun, srun or mpirun: each runs `run.py`, and all use the config that rank 0 composed."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ztk.core.launch.errors import RankFailure
from ztk.core.policies.records import replace_file

# Variables of a task: the number of tasks, its number, the number on its machine, and its number there.
_TASKS = {
    "mpirun": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")),
    "mpiexec": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    "mpirun of MVAPICH2": tuple(f"MV2_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")),
    "jsrun": tuple(f"JSM_NAMESPACE_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")),
    "flux": ("FLUX_JOB_SIZE", "FLUX_TASK_RANK", "", "FLUX_TASK_LOCAL_ID"),
    "submitit": ("SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_GLOBALID", "", "SUBMITIT_LOCAL_LOCALID"),
}
_SIZES = tuple(names[0] for names in _TASKS.values())
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
# Hydra makes a folder and logs in every process; ranks other than 0 must leave nothing.
_QUIET = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExternalRank:
    """A rank that another launcher started."""

    rank: int
    world_size: int
    local_world_size: int
    starter: str  # torchrun, srun, mpirun, ...

    @staticmethod
    def of_environment() -> "ExternalRank | None":
        """This process as a rank, or None if no launcher started it.

        Also sets the variables of srun and mpirun under the names that torch reads.

        Raises:
            ValueError: a launcher started several tasks, and the place of this one among them is not known. Alone, each would run the job.
        """
        starter = "torchrun" if "RANK" in os.environ else _named_place()
        if starter is None or "WORLD_SIZE" not in os.environ:
            return None
        world = _number("WORLD_SIZE")
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        return ExternalRank(rank=int(os.environ["RANK"]), world_size=world, local_world_size=local, starter=starter)

    def arguments(self, arguments: list[str]) -> list[str]:
        """The command line for this rank.

        Raises:
            ValueError: the command line is a sweep.
        """
        if any(argument in ("-m", "--multirun") or argument.startswith(("sweep=", "sweep.")) for argument in arguments):
            raise ValueError(
                f"{self.starter} cannot sweep: use `python run.py -m ...`, which starts the ranks of every run"
            )
        if self.rank != 0:
            replaced = {word.partition("=")[0] for word in _QUIET}
            return [*(word for word in arguments if word.partition("=")[0] not in replaced), *_QUIET]
        return arguments

    def tell_starter(self, failure: RankFailure) -> None:
        """Writes the error for torchrun, which prints its text at the end and fails on an incomplete file."""
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            extra = {"py_callstack": failure.trace, "timestamp": str(int(failure.time))}
            content = {"message": {"message": str(failure), "extraInfo": extra}}
            with contextlib.suppress(OSError):  # a full disk does not hide the failure, which the rank prints
                replace_file(Path(path), text=json.dumps(content))


def is_restart() -> bool:
    """Whether torchrun has restarted the ranks, or Slurm has requeued the job.

    An agent of torchrun does not count a restart that another node's failure caused, but it has the note of an earlier start.
    """
    note = _note_of_torchrun()
    return any(os.environ.get(name, "0") not in ("", "0") for name in _RESTARTS) or (
        note is not None and note.is_file()
    )


def restarted(arguments: list[str], *, command: str) -> list[str]:
    """The command line with the folder of its first start, if this is a restart that would make another folder. A sweep continues there.

    command: the whole command line, which distinguishes the commands of one job.
    """
    if not is_restart() or _chooses_folder(arguments):
        return arguments
    folders = [note.read_text(encoding="utf-8") for note in _notes_of_folder(command) if note.is_file()]
    if not folders:
        return arguments
    if _sweeps(arguments):
        kept = [argument for argument in arguments if not argument.startswith("hydra.sweep.dir=")]
        return [*kept, f"sweep.resume={quoted(folders[0])}"]
    return [*arguments, f"hydra.run.dir={quoted(folders[0])}"]


def remember_folder(folder: str, *, command: str) -> None:
    """Stores the folder of a run or a sweep for a restart of this command: by torchrun on one machine, by Slurm where the current folder is
    shared.
    """
    for note in _notes_of_folder(command):
        with contextlib.suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(folder, encoding="utf-8")


def _chooses_folder(arguments: list[str]) -> bool:
    chosen = ("sweep.resume=", "sweep.list=") if _sweeps(arguments) else ("hydra.run.dir=", "sweep")
    return any(argument.startswith(chosen) for argument in arguments)


def _sweeps(arguments: list[str]) -> bool:
    return any(argument in ("-m", "--multirun") for argument in arguments)


def _notes_of_folder(command: str) -> list[Path]:
    """Files that survive a restart: one of torchrun's agent, and one below the current folder for a Slurm job."""
    note, job = _note_of_torchrun(), os.environ.get("SLURM_JOB_ID")
    found = [] if note is None else [note]
    if job:
        found.append(Path("outputs", f".slurm-{job}-{hashlib.sha256(command.encode()).hexdigest()[:12]}"))
    return found


def _note_of_torchrun() -> Path | None:
    """A file next to the agent's own (.../attempt_0/0/error.json)."""
    errors = os.environ.get("TORCHELASTIC_ERROR_FILE")
    attempt = None if errors is None else Path(errors).parent.parent
    return attempt.parent / "ztk-run-folder" if attempt and attempt.name.startswith("attempt_") else None


def _named_place() -> str | None:
    """Sets torch's variables for a task of another launcher than torchrun. Returns its name, or None for a process of its own."""
    for starter, names in _TASKS.items():
        size, rank, local_size, local_rank = names
        if _number(size, default=1) < 2 or _is_of_slurm(size=size, rank=rank):
            continue
        if all(name in os.environ for name in (rank, local_size, local_rank, "MASTER_ADDR", "MASTER_PORT")):
            own = zip(("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"), names, strict=True)
            os.environ.update({name: os.environ[of] for name, of in own})
            return starter
        export = f", or give them MASTER_ADDR and MASTER_PORT of the first one ({starter} -x)" if local_size else ""
        raise ValueError(
            f"{size}={os.environ[size]}: {starter} started several tasks, and each would run this job alone; use torchrun "
            f"--nproc-per-node={os.environ[size]} run.py ... on one machine and torchrun --nnodes=N on several{export}"
        )
    if _number("SLURM_STEP_NUM_TASKS", default=1) > 1:
        os.environ.update(_slurm_names(os.environ))
        return "srun"
    if (
        "SLURM_STEP_NUM_TASKS" not in os.environ
        and "SLURM_PROCID" in os.environ
        and _number("SLURM_NTASKS", default=1) > 1
        and os.environ.get("SLURM_JOB_NUM_NODES", os.environ.get("SLURM_NNODES")) != "1"
    ):
        raise ValueError(
            f"SLURM_NTASKS={os.environ['SLURM_NTASKS']}: the job has several tasks, and this command would run alone; use srun python "
            "run.py ..., or #SBATCH --ntasks=1 for a run whose ranks this command starts on one node"
        )
    if "PMIX_RANK" in os.environ and not any(name in os.environ for name in (*_SIZES, "SLURM_STEP_NUM_TASKS")):
        raise ValueError(
            f"PMIX_RANK={os.environ['PMIX_RANK']}: the number of tasks is not known, and each would run this job alone; use torchrun "
            "--nproc-per-node=N run.py ..."
        )
    if _number("WORLD_SIZE", default=1) > 1:
        raise ValueError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} without RANK: use torchrun --nproc-per-node={os.environ['WORLD_SIZE']} run.py ..., which "
            "sets both, or unset WORLD_SIZE"
        )
    return None


def _is_of_slurm(*, size: str, rank: str) -> bool:
    """Whether srun set the variables of PMI next to its own."""
    own = ((size, "SLURM_STEP_NUM_TASKS"), (rank, "SLURM_PROCID"))
    return all(slurm in os.environ and os.environ.get(name) == os.environ[slurm] for name, slurm in own)


def _number(name: str, *, default: int | None = None) -> int:
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name}={text}: must be a whole number; start ranks by torchrun, which sets it")
    return int(text)


def quoted(value: object) -> str:
    """A path or text as a value in Hydra's grammar, which doubles backslashes only in front of a quote."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: 2 * found[1] + found[2].replace("'", "\\'"), str(value)) + "'"


def _slurm_names(slurm: os._Environ | dict[str, str]) -> dict[str, str]:
    """torch's variables for a task of a SLURM step. The port is derived from the ids of job and step, which are equal on all nodes."""
    port = 15000 + (int(slurm["SLURM_JOB_ID"]) * 31 + int(slurm.get("SLURM_STEP_ID", 0))) % 16000
    own = {
        "RANK": slurm["SLURM_PROCID"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "WORLD_SIZE": slurm["SLURM_STEP_NUM_TASKS"],
        "LOCAL_WORLD_SIZE": str(_tasks_on_node(slurm["SLURM_STEP_TASKS_PER_NODE"], node=int(slurm["SLURM_NODEID"]))),
    }
    address = {"MASTER_ADDR": _first_host(slurm["SLURM_STEP_NODELIST"]), "MASTER_PORT": str(port)}
    return own | {name: value for name, value in address.items() if name not in slurm}


def _tasks_on_node(text: str, *, node: int) -> int:
    """`4(x2),1` lists 4, 4 and 1 tasks."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        assert match is not None, f"SLURM_STEP_TASKS_PER_NODE={text}"
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node]


def _first_host(nodes: str) -> str:
    """The first name of a list like `node[03-07,12],login1`."""
    if shutil.which("scontrol"):
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=30, check=False
        )
        if done.returncode == 0 and done.stdout.split():
            return done.stdout.split()[0]
    match = re.match(r"(?P<stem>[^,\[]+)(\[(?P<first>\d+))?", nodes)
    assert match is not None, f"SLURM_STEP_NODELIST={nodes}"
    return match["stem"] + (match["first"] or "")
