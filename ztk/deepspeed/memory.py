"""How much memory is in use, for scripts that log it: `see_memory_usage` and its neighbours in `deepspeed.runtime.utils`."""

from dataclasses import dataclass

import torch.distributed as dist

from ztk.core.runtime.system_memory import machine_memory, process_memory
from ztk.deepspeed.device import get_accelerator
from ztk.deepspeed.log import logger, show_messages

GIB = 2**30


def get_ma_status() -> int:
    """Bytes that this process has allocated on its device; 0 on other ranks than 0."""
    return 0 if dist.is_initialized() and dist.get_rank() else get_accelerator().memory_allocated()


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Logs the device's memory and what changed since the last call. print_rank: -1 for every rank."""
    global _last
    rank = dist.get_rank() if dist.is_initialized() else 0
    if print_rank not in (-1, rank):
        return
    if reset_max:
        get_accelerator().reset_peak_memory_stats()
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
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Device:
    """Bytes on the GPU, or of this process."""

    allocated: int = 0
    most_allocated: int = 0
    reserved: int = 0
    most_reserved: int = 0


_last = _Device()


def _now() -> _Device:
    device = get_accelerator()
    return _Device(
        allocated=device.memory_allocated(),
        most_allocated=device.max_memory_allocated(),
        reserved=device.memory_reserved(),
        most_reserved=device.max_memory_reserved(),
    )


def see_memory_usage(message: str, force: bool = False) -> None:
    """Rank 0 logs the GPU's and the machine's memory after `message`; nothing happens unless `force`. Resets the GPU's peaks."""
    if not force or (dist.is_initialized() and dist.get_rank()):
        return
    show_messages(None)
    logger.info(message)
    if not get_accelerator().is_synchronized_device():  # a GPU
        now = _now()
        values = (now.allocated, now.most_allocated, now.reserved, now.most_reserved)
        logger.info("MA %.2f GB, max MA %.2f GB, CA %.2f GB, max CA %.2f GB", *(nbytes / GIB for nbytes in values))
        get_accelerator().reset_peak_memory_stats()
    host, own = machine_memory(), process_memory()
    used = host["MemTotal"] - host["MemAvailable"]
    logger.info(
        "CPU virtual memory: used = %.2f GB, percent = %.1f%%, this process = %.2f GB",
        used / GIB,
        100 * used / host["MemTotal"],
        own["VmRSS"] / GIB,
    )
