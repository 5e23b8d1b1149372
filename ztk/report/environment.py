"""The machine and the software of a run."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("torch", "triton", "numpy", "hydra-core", "omegaconf", "wandb", "safetensors")


def describe_environment(*, device: torch.device, world_size: int) -> dict[str, Any]:
    """The values of `env.json`: versions, commit, device, world size."""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        "commit": _commit(),
        "device": device.type,
        "device_name": device_name(device),
        "world_size": world_size,
        "host": platform.node(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "command": " ".join(sys.argv),
    }


def version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout that contains this file, with a + for uncommitted changes; None without git."""
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--abbrev=40",
        "--dirty=+",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def device_name(device: torch.device) -> str:
    """The product name of the GPU or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
