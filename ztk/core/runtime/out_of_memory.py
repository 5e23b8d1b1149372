"""Memory report of a rank whose allocation failed."""

import gc
from dataclasses import dataclass, field

import torch

from ztk.core.runtime.memory import MemoryLedger, Tier
from ztk.core.runtime.system_memory import process_memory

_TEXTS = ("can't allocate memory", "not enough memory")  # messages of torch's CPU allocator


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryState:
    """Bytes of a rank. booked: sums of its ledgers, by tier and category. device: figures of the GPU's driver and allocator (`total`, `free`,
    `allocated`, `reserved`, `max_allocated`); without a GPU, `resident` and `max_resident` of the process."""

    booked: dict[str, dict[str, int]] = field(default_factory=dict)
    device: dict[str, int] = field(default_factory=dict)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is a failed allocation, on a GPU or in main memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def memory_state() -> MemoryState:
    """The current state of this process. Includes models that a traceback keeps alive, so call it while the error is handled."""
    ledgers = [found for found in gc.get_objects() if type(found) is MemoryLedger]
    booked: dict[str, dict[str, int]] = {}
    for ledger in ledgers:
        for tier in Tier:
            for category, nbytes in ledger.by_category(tier).items():
                held = booked.setdefault(tier.label, {})
                held[category] = held.get(category, 0) + nbytes
    return MemoryState(booked=booked, device=_of_gpu() if torch.cuda.is_initialized() else _of_process())


def _of_gpu() -> dict[str, int]:
    free, total = torch.cuda.mem_get_info()
    return {
        "total": total,
        "free": free,
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "max_allocated": torch.cuda.max_memory_allocated(),
    }


def _of_process() -> dict[str, int]:
    own = process_memory()
    return {"resident": own["VmRSS"], "max_resident": own["VmHWM"]}
