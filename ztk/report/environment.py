"""Describes the machine and the software of a run."""

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from ztk.core.policies.machine import hosts
from ztk.report.commit import read_commit

COMMAND = "ZTK_COMMAND"  # environment variable with the command line that started the run
_PACKAGES = ("torch", "triton", "numpy", "hydra-core", "omegaconf", "wandb", "safetensors")


def describe_environment(*, device: torch.device, world_size: int) -> dict[str, Any]:
    """Returns the values of `env.json`: versions, commit, device, world size, and the host of each rank as `hosts`."""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        "commit": read_commit(),
        "device": device.type,
        "device_name": device_name(device),
        "world_size": world_size,
        "host": platform.node(),
        "hosts": hosts() or [platform.node()] * world_size,
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "command": os.environ.get(COMMAND, " ".join(sys.argv)),
    }


def version(package: str) -> str | None:
    """Returns the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name(device: torch.device) -> str:
    """Returns the product name of the GPU or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
