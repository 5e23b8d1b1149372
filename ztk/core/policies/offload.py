"""Keys and policy of offloading: which states, to which tier, and through how much memory."""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from enum import StrEnum
from typing import ClassVar, Protocol

from ztk.core.policies.key import Changes, When, key, key_faults
from ztk.core.policies.paths import Paths
from ztk.core.policies.ranges import INT64_MAX, PART, Range, member, refuse
from ztk.core.policies.runs import ANSWERING, device_of, infers, offloads, others_offload
from ztk.core.policies.tier import Tier

PAGE_BYTES = 4096  # O_DIRECT: offsets, lengths and addresses are multiples of this on every filesystem of interest
MIN_BUFFER_COUNT = 3  # one slot being read, one being updated, one being written
MAX_THREADS = 1024  # each is a thread of the process, with a block of its own
# `auto` follows `offload.optimizer` at stage 3 and is `none` below.
# pyrefly: ignore[invalid-literal]  # the members follow another enum
ParameterTier = StrEnum("ParameterTier", ["auto", *Tier])


_PAGES = Range(low=PAGE_BYTES, high=INT64_MAX, words=f"a multiple of {PAGE_BYTES}")
_NVME = When("offload=nvme", lambda config, machine: offloads(config, tier=Tier.nvme))
_TRAINED_NVME = When(
    "offload=nvme in a run that trains",
    lambda config, machine: offloads(config, tier=Tier.nvme) and not infers(config),
)
_ANY_NVME = When(
    "offload=nvme, or ema.offload, reference.offload, critic.offload or reward.offload",
    lambda config, machine: offloads(config, tier=Tier.nvme) or others_offload(config, tier=Tier.nvme),
)
_STATES = When(
    "offload.optimizer=cpu or nvme in a run that trains",
    lambda config, machine: config.offload.optimizer is not Tier.none and config.task.name not in ANSWERING,
)
_PINNED = When(
    "offload=cpu or offload=nvme on a GPU",
    lambda config, machine: (
        (offloads(config, tier=Tier.nvme) or offloads(config, tier=Tier.cpu))
        and device_of(config, machine=machine) == "cuda"
    ),
)


@dataclass(kw_only=True)
class OffloadConfig:
    """Where a rank's shards are stored between their uses."""

    changes: ClassVar = Changes.experiment

    optimizer: Tier = key(
        "tier of the optimizer states: none (the device), cpu (main memory), nvme (files)", default=MISSING
    )
    optimizer_fraction: float | None = key(
        "part of the optimizer states that is offloaded, in whole buckets; the rest stays on the device and is updated there",
        default=1.0,
        range=PART,
        acts=_STATES,
    )
    parameters: ParameterTier = key(
        "tier of the parameters; auto: as offload.optimizer at stage 3, on the device below", default=MISSING
    )
    nvme_path: str | None = key(
        "folder on the disk to use; null: nvme/ in the run folder, or below $SLURM_TMPDIR or $TMPDIR where that is a disk and the run folder "
        "is on a network file system",
        acts=_ANY_NVME,
        optional=True,
        changes=Changes.nothing,
        paths=Paths(),
    )
    buffer_count: int | None = key(
        "buffers of the pool through which shards pass",
        range=Range(low=MIN_BUFFER_COUNT, high=65_536),
        acts=_TRAINED_NVME,
    )
    buffer_bytes: int | None = key(
        "bytes of one buffer; less if the largest shard needs less", range=_PAGES, acts=_TRAINED_NVME
    )
    block_bytes: int | None = key(
        "bytes of one read or write. Main memory per rank is at most buffer_count * buffer_bytes + threads * block_bytes",
        range=_PAGES,
        acts=_NVME,
    )
    threads: int | None = key("concurrent reads and writes", range=Range(low=1, high=MAX_THREADS), acts=_NVME)
    pin_memory: bool | None = key(
        "page-locked buffers, for copies to and from a GPU; null: true", acts=_PINNED, optional=True
    )
    direct_io: bool | None = key("read and write past the page cache (O_DIRECT)", acts=_NVME)


class OffloadChoices(Protocol):
    """The fields that rules read; None if not given."""

    optimizer: str
    parameters: str
    buffer_bytes: int | None
    block_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadPolicy:
    """Choices of the offload tier (ZeRO-Infinity, https://arxiv.org/abs/2104.07857, section 5).

    optimizer, parameters: the tier on which optimizer states (with fp32 master weights) and parameter shards are stored.
    optimizer_fraction: the part of the optimizer states that is offloaded, by elements. The rest, in whole buckets, stays on the device and
        is updated there: never more than 1 - optimizer_fraction, and less if no bucket fits. No value changes a bit of the training.
    nvme_path: folder for the offload files, one per rank; created if it is missing. Needed for `nvme`, else unused.
    buffer_count, buffer_bytes: the pool. Three buffers take slots of any size up to `buffer_bytes`, so that one slot can be read while
        another is updated and a third is written. The memory of the other buffers is allocated by the slots' own sizes.
    block_bytes: bytes per system call. Large blocks matter more than the interface: 8 MiB reaches fio's best.
    threads: system calls in flight; each thread owns one more block of the pool for unaligned memory.
    pin_memory: page-lock host memory when CUDA is present, so that copies to the device run asynchronously.
    direct_io: O_DIRECT, past the page cache. False goes through the page cache: slower writes, memory use outside the
        pool (the kernel's), but works on every filesystem.

    Main memory in use for `nvme`: buffer_count * buffer_bytes + threads * min(block_bytes, buffer_bytes).

    Raises ValueError naming key, value and fix for values that cannot work.
    """

    optimizer: Tier = Tier.none
    optimizer_fraction: float = 1.0
    parameters: Tier = Tier.none
    nvme_path: str | None = None
    buffer_count: int = 9
    buffer_bytes: int = 32 << 20
    block_bytes: int = 8 << 20
    threads: int = 4
    pin_memory: bool = True
    direct_io: bool = True

    def __post_init__(self) -> None:
        for name in ("optimizer", "parameters"):
            object.__setattr__(self, name, member(getattr(self, name), of=Tier, key=f"offload.{name}"))
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        if self.uses_nvme and not self.nvme_path:
            yield "offload.nvme_path is empty, but nvme offload needs a folder: set offload.nvme_path=FOLDER"
        yield from key_faults(self, keys=OffloadConfig, section="offload")
        yield from page_faults(self)

    @property
    def uses_nvme(self) -> bool:
        """Whether anything is offloaded to files."""
        return Tier.nvme in (self.optimizer, self.parameters)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the block that each I/O thread owns."""
        return min(self.block_bytes, self.buffer_bytes)

    @property
    def pool_bytes(self) -> int:
        """All main memory that an NvmeStore of this policy holds, in bytes."""
        return self.buffer_count * self.buffer_bytes + self.threads * self.staging_bytes


def page_faults(offload: OffloadChoices) -> Iterator[str]:
    """Buffers and blocks are multiples of a page."""
    for name in ("buffer_bytes", "block_bytes"):
        value = getattr(offload, name)
        if value is not None and value >= 1 and value % PAGE_BYTES:
            yield (
                f"offload.{name}={value}: must be a multiple of {PAGE_BYTES}, as direct I/O needs; use "
                f"offload.{name}={-(-value // PAGE_BYTES) * PAGE_BYTES}"
            )
