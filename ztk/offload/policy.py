"""What is offloaded, where to, and through how much memory."""

from dataclasses import dataclass
from enum import StrEnum

PAGE_BYTES = 4096  # O_DIRECT: offsets, lengths and addresses are multiples of this on every filesystem of interest
MIN_BUFFER_COUNT = 3  # one slot being read, one being updated, one being written


class OffloadTarget(StrEnum):
    """Where a shard is stored between its uses."""

    none = "none"  # the memory the model computes in: no offloading
    cpu = "cpu"  # main memory, pinned beside a GPU
    nvme = "nvme"  # a file; main memory holds the buffer pool only


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadPolicy:
    """Choices of the offload tier (ZeRO-Infinity, https://arxiv.org/abs/2104.07857, section 5).

    optimizer, parameters: where optimizer states (with fp32 master weights) and parameter shards are stored.
    nvme_path: folder for the offload files, one per rank; created if it is missing. Needed for `nvme`, else unused.
    buffer_count, buffer_bytes: the pool. Three buffers take slots of any size up to buffer_bytes, enough to read one slot, update
        one and write one. The memory of the others is given out by the slots' own sizes.
    block_bytes: how much one system call moves. Large blocks matter more than the interface: 8 MiB is as fast as fio at its best.
    threads: system calls at one time. Each thread owns one more block of the pool, for unaligned memory.
    pin_memory: page-lock host memory when CUDA is present, so that copies to the device run asynchronously.
    direct_io: O_DIRECT, past the page cache. False goes through the page cache: writes are slower and the kernel uses memory
        outside of the pool, but it works on every filesystem.

    Main memory in use for `nvme`: buffer_count * buffer_bytes + threads * min(block_bytes, buffer_bytes).

    Raises ValueError naming key, value and fix for values that cannot work.
    """

    optimizer: OffloadTarget = OffloadTarget.none
    parameters: OffloadTarget = OffloadTarget.none
    nvme_path: str | None = None
    buffer_count: int = 9
    buffer_bytes: int = 32 << 20
    block_bytes: int = 8 << 20
    threads: int = 4
    pin_memory: bool = True
    direct_io: bool = True

    def __post_init__(self) -> None:
        for key in ("optimizer", "parameters"):
            object.__setattr__(self, key, _target(key, value=getattr(self, key)))
        if self.uses_nvme and not self.nvme_path:
            raise ValueError(
                "offload.nvme_path is empty, but nvme offload needs a folder: set offload.nvme_path=FOLDER"
            )
        if self.buffer_count < MIN_BUFFER_COUNT:
            raise ValueError(
                f"offload.buffer_count={self.buffer_count} is too few: one buffer is read while one is updated and one "
                f"is written; set offload.buffer_count={MIN_BUFFER_COUNT} or more"
            )
        for key in ("buffer_bytes", "block_bytes"):
            value = getattr(self, key)
            if value <= 0 or value % PAGE_BYTES:
                fixed = max(PAGE_BYTES, -(-value // PAGE_BYTES) * PAGE_BYTES)
                raise ValueError(
                    f"offload.{key}={value} is not a positive multiple of {PAGE_BYTES}, which direct I/O needs; "
                    f"set offload.{key}={fixed}"
                )
        if self.threads < 1:
            raise ValueError(f"offload.threads={self.threads} cannot move anything; set offload.threads=1 or more")

    @property
    def uses_nvme(self) -> bool:
        """Something is offloaded to files."""
        return OffloadTarget.nvme in (self.optimizer, self.parameters)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the block each I/O thread owns."""
        return min(self.block_bytes, self.buffer_bytes)

    @property
    def pool_bytes(self) -> int:
        """All main memory that an NvmeStore of this policy takes."""
        return self.buffer_count * self.buffer_bytes + self.threads * self.staging_bytes


def _target(key: str, *, value: str) -> OffloadTarget:
    try:
        return OffloadTarget(value)
    except ValueError:
        known = ", ".join(OffloadTarget)
        raise ValueError(f"offload.{key}={value!r} is not a place to offload to; choose one of {known}") from None
