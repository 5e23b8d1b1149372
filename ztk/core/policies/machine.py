"""The resources of this machine, found without importing torch: the starting process must be quick and must not occupy a GPU."""

import importlib.util
import os
import runpy
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

HOSTS = "ZTK_HOSTS"  # variable of a rank that another launcher started: the host names of all ranks


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
