"""Ranks started by torchrun or srun: each runs `run.py`, and all use the config that rank 0 composed."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ztk.core.launch.errors import RankFailure
from ztk.core.policies.records import replace_file

# Hydra makes a folder and logs in every process; ranks other than 0 must leave nothing.
_QUIET = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExternalRank:
    """A rank that another launcher started."""

    rank: int
    world_size: int
    local_world_size: int
    starter: str  # torchrun or srun

    @staticmethod
    def of_environment() -> "ExternalRank | None":
        """This process as a rank, or None if no launcher started it.

        Also sets srun's variables under the names that torch reads.
        """
        if "RANK" not in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
            os.environ.update(_slurm_names(os.environ))
            starter = "srun"
        else:
            starter = "torchrun"
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None
        world = int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        return ExternalRank(rank=int(os.environ["RANK"]), world_size=world, local_world_size=local, starter=starter)

    def arguments(self, arguments: list[str]) -> list[str]:
        """The command line for this rank. After a restart it names the run folder of the first start.

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
        chosen = any(argument.startswith("hydra.run.dir=") for argument in arguments)
        note = _note_of_folder()
        if chosen or note is None or not note.exists():
            return arguments
        return [*arguments, f"hydra.run.dir={quoted(note.read_text(encoding='utf-8'))}"]

    def remember_folder(self, folder: str) -> None:
        """Stores the run folder for rank 0 of a restart by torchrun. Works on one machine; on several, set `hydra.run.dir`."""
        if self.rank == 0 and (note := _note_of_folder()) is not None:
            note.write_text(folder, encoding="utf-8")

    def tell_starter(self, failure: RankFailure) -> None:
        """Writes the error for torchrun, which prints its text at the end and fails on an incomplete file."""
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            extra = {"py_callstack": failure.trace, "timestamp": str(int(failure.time))}
            content = {"message": {"message": str(failure), "extraInfo": extra}}
            replace_file(Path(path), text=json.dumps(content))


def _note_of_folder() -> Path | None:
    """A file next to torchrun's own that survives a restart of the ranks (.../attempt_0/0/error.json)."""
    errors = os.environ.get("TORCHELASTIC_ERROR_FILE")
    attempt = None if errors is None else Path(errors).parent.parent
    return attempt.parent / "ztk-run-folder" if attempt and attempt.name.startswith("attempt_") else None


def quoted(value: object) -> str:
    """A path or text as a value in Hydra's grammar."""
    return "'" + str(value).replace("'", "\\'") + "'"


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
