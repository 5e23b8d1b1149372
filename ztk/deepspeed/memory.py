"""How much memory is in use: `see_memory_usage`, and the numbers of this process and this machine."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ztk.deepspeed.log import logger, show_messages

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Bytes of main memory: resident in this process, now and at most; of the machine, and what a new program could have of it."""

    process: int
    most: int
    total: int
    available: int


def host_memory() -> HostMemory:
    """From the kernel's numbers (Linux)."""
    machine = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        machine[key] = 1024 * int(value.split()[0])
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Vm"))
    own = {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines}
    return HostMemory(
        process=own["VmRSS"],
        most=max(own["VmHWM"], own["VmRSS"]),
        total=machine["MemTotal"],
        available=machine["MemAvailable"],
    )


def get_ma_status() -> int:
    """Bytes that this process has allocated on its device; 0 on other ranks than 0."""
    return 0 if dist.is_initialized() and dist.get_rank() else _now().allocated


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Logs the device's memory and what changed since the last call. print_rank: -1 for every rank."""
    global _last
    rank = dist.get_rank() if dist.is_initialized() else 0
    if print_rank not in (-1, rank):
        return
    if reset_max and torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    now = _now()
    before, _last = _last, now
    show_messages(None)
    logger.info(
        "RANK=%d MEMSTATS %s current alloc=%.4fGB (delta=%.4fGB max=%.4fGB) current cache=%.4fGB (delta=%.4fGB max=%.4fGB)",
        *(rank, msg, now.allocated / GIB, (now.allocated - before.allocated) / GIB, now.most_allocated / GIB),
        *(now.reserved / GIB, (now.reserved - before.reserved) / GIB, now.most_reserved / GIB),
    )


def empty_cache() -> None:
    """Gives what the GPU's allocator holds in reserve back, and forgets its peaks."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Device:
    """Bytes on the GPU, or of this process."""

    allocated: int = 0
    most_allocated: int = 0
    reserved: int = 0
    most_reserved: int = 0


_last = _Device()


def _now() -> _Device:
    if not torch.cuda.is_available():
        host = host_memory()
        return _Device(allocated=host.process, most_allocated=host.most, reserved=host.process, most_reserved=host.most)
    return _Device(
        allocated=torch.cuda.memory_allocated(),
        most_allocated=torch.cuda.max_memory_allocated(),
        reserved=torch.cuda.memory_reserved(),
        most_reserved=torch.cuda.max_memory_reserved(),
    )


def see_memory_usage(message: str, force: bool = False) -> None:
    """Rank 0 logs the GPU's and the machine's memory after `message`; nothing happens unless `force`. Resets the GPU's peaks."""
    if not force or (dist.is_initialized() and dist.get_rank()):
        return
    show_messages(None)
    logger.info(message)
    if torch.cuda.is_available():
        now = _now()
        values = (now.allocated, now.most_allocated, now.reserved, now.most_reserved)
        logger.info("MA %.2f GB, max MA %.2f GB, CA %.2f GB, max CA %.2f GB", *(nbytes / GIB for nbytes in values))
        torch.cuda.reset_peak_memory_stats()
    host = host_memory()
    used = host.total - host.available
    logger.info(
        "CPU virtual memory: used = %.2f GB, percent = %.1f%%, this process = %.2f GB",
        used / GIB,
        100 * used / host.total,
        host.process / GIB,
    )
