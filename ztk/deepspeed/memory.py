"""How much memory is in use: `see_memory_usage`, and the figures of this process and this machine."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ztk.deepspeed.log import logger, show_messages

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Bytes of main memory: resident in this process; of the machine, and what a new program could have of it."""

    process: int
    total: int
    available: int


def host_memory() -> HostMemory:
    """From the kernel's figures (Linux)."""
    machine = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        machine[key] = 1024 * int(value.split()[0])
    process = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return HostMemory(
        process=1024 * int(process.split()[1]), total=machine["MemTotal"], available=machine["MemAvailable"]
    )


def see_memory_usage(message: str, force: bool = False) -> None:
    """Rank 0 logs the GPU's and the machine's memory after `message`; nothing happens unless `force`. Resets the GPU's peaks."""
    if not force or (dist.is_initialized() and dist.get_rank()):
        return
    show_messages(None)
    logger.info(message)
    if torch.cuda.is_available():
        logger.info(
            "MA %.2f GB, max MA %.2f GB, CA %.2f GB, max CA %.2f GB",
            torch.cuda.memory_allocated() / GIB,
            torch.cuda.max_memory_allocated() / GIB,
            torch.cuda.memory_reserved() / GIB,
            torch.cuda.max_memory_reserved() / GIB,
        )
        torch.cuda.reset_peak_memory_stats()
    host = host_memory()
    used = host.total - host.available
    logger.info(
        "CPU virtual memory: used = %.2f GB, percent = %.1f%%, this process = %.2f GB",
        used / GIB,
        100 * used / host.total,
        host.process / GIB,
    )
