"""Commands that start a run on other machines.

Every machine runs one `ztk.deepspeed.runner.node`, which starts the ranks there. Over ssh it gets the machine's number; a task of srun
looks up the machine's name. Other launchers start this command on every machine, with --no_ssh and the number that they provide.
"""

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ztk.core.launch import python_path
from ztk.deepspeed.runner.hosts import LOCALHOST, Host
from ztk.deepspeed.runner.node import Plan

LAUNCHERS = ("ssh", "slurm")
# DeepSpeed's other launchers -> variable with the number of a task's machine, one task per machine.
NODE_VARIABLES = {
    "openmpi": "OMPI_COMM_WORLD_RANK",
    "mpich": "PMI_RANK",
    "impi": "PMI_RANK",
    "mvapich": "MV2_COMM_WORLD_RANK",
}
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "GLOO"]  # prefixes of variables that are exported to the run
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """starts: the commands, one per machine or one for all. stop: commands that end ranks left running by a lost connection."""

    starts: tuple[tuple[str, ...], ...]
    stop: tuple[tuple[str, ...], ...] = ()


def is_local(host: Host) -> bool:
    """Returns whether the machine needs no connection."""
    return host.name in {LOCALHOST, "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn()}


def reach(
    plan: Plan, *, launcher: str, options: Sequence[str], ssh_port: int | None, prepare: str | None = None
) -> Reach:
    """Returns the commands for all machines of the plan.

    options: the launcher's own. prepare: a shell script to source first, for example of a virtual environment.
    """
    exports = exported(os.environ, files=(Path.home() / DEEPSPEED_ENVIRONMENT_NAME, Path(DEEPSPEED_ENVIRONMENT_NAME)))
    if launcher == "ssh":
        port = () if ssh_port is None else ("-p", str(ssh_port))
        starts, stop = [], []
        for number, host in enumerate(plan.hosts):
            if is_local(host):
                starts.append((sys.executable, "-u", "-m", "ztk.deepspeed.runner.node", plan.encoded(), str(number)))
                continue
            line = shell_line(plan, node=str(number), exports=exports, prepare=prepare)
            starts.append(("ssh", *port, *options, host.name, line))
            stop.append(("ssh", *port, *options, host.name, _stop_line(plan)))
        return Reach(starts=tuple(starts), stop=tuple(stop))
    many = str(len(plan.hosts))
    nodes = ("-N", many, "-n", many, "--ntasks-per-node=1", f"--nodelist={','.join(host.name for host in plan.hosts)}")
    line = shell_line(plan, node="$SLURMD_NODENAME", exports=exports, prepare=prepare)
    return Reach(starts=(("srun", *nodes, *options, "bash", "-c", line),))


def shell_line(plan: Plan, *, node: str, exports: Mapping[str, str], prepare: str | None) -> str:
    """Returns the shell command for a machine: in the same folder, with the exported variables."""
    words = [f"export {key}={shlex.quote(value)};" for key, value in exports.items()]
    words.append(f"cd {shlex.quote(os.getcwd())} &&")
    if prepare is not None:
        words.append(f". {shlex.quote(prepare)} &&")
    words += ["exec", shlex.quote(sys.executable), "-u", "-m", "ztk.deepspeed.runner.node", plan.encoded(), node]
    return " ".join(words)


def exported(environment: Mapping[str, str], *, files: Sequence[Path]) -> dict[str, str]:
    """Returns the variables to export: Python's, NCCL's and similar ones, and the lines `KEY=value` of `files`.

    Raises ValueError for another line.
    """
    found = {key: value for key, value in environment.items() if key.startswith(tuple(EXPORT_ENVS))}
    found["PYTHONPATH"] = python_path()
    for path in files:
        for line in path.read_text().splitlines() if path.is_file() else ():
            key, equals, value = line.strip().partition("=")
            if not line.strip() or key.startswith("#"):
                continue
            if not equals or not key.isidentifier():
                raise ValueError(f"{path}: {line!r} must look like NAME=value")
            found[key] = value
    return found


def check_launcher(launcher: str) -> None:
    """Raises ValueError if the launcher's program is missing."""
    program = {"slurm": "srun"}.get(launcher, launcher)
    if shutil.which(program) is None:
        raise ValueError(f"--launcher={launcher}: this machine has no program {program}; install it")


def address_of(host: Host, *, launcher: str, ssh_port: int | None) -> str:
    """Returns the address at which other machines reach `host`. Raises ValueError if the machine cannot be queried."""
    if launcher == "slurm":
        return host.name  # a hostname of the cluster
    port = () if ssh_port is None else ("-p", str(ssh_port))
    there = () if is_local(host) else ("ssh", *port, host.name)
    try:
        done = subprocess.run([*there, "hostname", "-I"], capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise ValueError(
            f"{host.name} does not print its address by `{' '.join([*there, 'hostname', '-I'])}` ({error}): let ssh reach it "
            "without a password, or give --master_addr"
        ) from error


def _stop_line(plan: Plan) -> str:
    """Ends the machine's `node`, which ends its ranks. The brackets prevent the pattern from matching this command itself."""
    word = plan.encoded()
    return f"pkill -TERM -f '[{word[0]}]{word[1:]}'"
