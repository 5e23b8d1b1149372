"""The resources of this machine, found without importing torch: the starting process must be quick and must not occupy a GPU."""

import importlib.util
import os
import runpy
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

_HOSTS = "ZTK_HOSTS"  # variable of a rank that another launcher started: the host names of all ranks
_LISTED = 8  # ranks in a message


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """gpus: number of GPUs that torch can use. cores: number of cores that this process may use.

    started_ranks, started_here: number of ranks in total and on this machine that torchrun or srun started, else 0.
    """

    gpus: int
    cores: int
    started_ranks: int = 0
    started_here: int = 0

    @staticmethod
    def here(*, started_ranks: int = 0, started_here: int = 0) -> "Machine":
        """Returns the machine that this process runs on."""
        return Machine(gpus=count_gpus(), cores=count_cores(), started_ranks=started_ranks, started_here=started_here)


def set_hosts(hosts: Sequence[str]) -> None:
    """Stores the host name of each rank for `hosts` and `place_of`, here and in child processes.

    Equal neighbours are stored once: a variable of more than 128 KB, as of 2,048 long names, would keep every child process from starting.
    """
    runs = [(host, len(list(same))) for host, same in groupby(hosts)]
    os.environ[_HOSTS] = " ".join(f"{host}*{count}" for host, count in runs)


def hosts() -> list[str]:
    """Returns the host name of each rank. Empty if all ranks were started by one command on this machine."""
    runs = [entry.partition("*") for entry in os.environ.get(_HOSTS, "").split()]
    return [host for host, _, count in runs for _ in range(int(count or 1))]


def place_of(rank: int) -> str:
    """Returns `rank 3`, or `rank 3 on HOST` if the run has several hosts. For messages."""
    names = hosts()
    return f"rank {rank} on {names[rank]}" if rank < len(names) and len(set(names)) > 1 else f"rank {rank}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns the numbers of ranks for a message, in few words though there may be thousands."""
    steps = {after - before for before, after in pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1:
        step = steps.pop()
        return f"ranks {ranks[0]} to {ranks[-1]}" + (f" in steps of {step}" if step > 1 else "")
    listed = ", ".join(map(str, ranks[:_LISTED]))
    return f"ranks {listed}" + (f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else "")


def count_cores() -> int:
    """Returns the number of cores in the affinity mask, limited by a container's quota (cgroup v2)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def count_gpus() -> int:
    """Returns the number of visible GPUs that the installed torch supports."""
    backend = _torch_backend()
    if backend is None:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES" if backend == "cuda" else "HIP_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return 0
    if backend == "cuda":
        present = sum(line.startswith("GPU ") for line in _lines("nvidia-smi", "-L"))
    else:
        present = sum("GUID" in line for line in _lines("rocm-smi", "--showid"))
    return present if visible is None else min(present, len(visible.split(",")))


def gpu_addresses() -> list[str]:
    """Returns the PCI address of each visible GPU of NVIDIA, as in `0000:3b:00.0`, in the order of torch's numbers.

    Empty if the driver does not name one of them. torch's order is the driver's where all GPUs are of one kind.
    """
    lines = _lines("nvidia-smi", "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader")
    found = {uuid.strip(): address.strip().lower() for uuid, _, address in (line.partition(",") for line in lines)}
    addresses = [f"{int(domain, 16):04x}:{rest}" for domain, _, rest in (one.partition(":") for one in found.values())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return addresses
    by_name = dict(zip([*found, *map(str, range(len(addresses)))], addresses * 2, strict=True))
    words = [word.strip() for word in visible.split(",")]
    return [by_name[word] for word in words] if all(word in by_name for word in words) else []


def _torch_backend() -> str | None:
    """Returns `cuda`, `hip` or None, from the torch package's version file."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return "cuda" if version.get("cuda") else "hip" if version.get("hip") else None


def _lines(*command: str) -> list[str]:
    if shutil.which(command[0]) is None:
        return []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()
