"""Offloading: which states, to which tier, and through how much memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol

from ztk.core.policies.key import Changes, When, key, key_faults, section
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


class OffloadChoices(Protocol):
    """The fields that rules read; None if not given."""

    optimizer: str
    parameters: str
    buffer_bytes: int | None
    block_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadPolicy:
    """Where a rank's shards are stored between their uses (ZeRO-Infinity, https://arxiv.org/abs/2104.07857, section 5).

    optimizer_fraction: counted in elements. The device keeps at most 1 - optimizer_fraction, and less if no bucket fits. No value changes a
        bit of the training.
    nvme_path: needed for `nvme`, created if it is missing. A rank has one file there.
    buffer_count, buffer_bytes: three buffers take slots of any size up to `buffer_bytes`, so that one slot can be read while another is
        updated and a third is written. The memory of the other buffers is allocated by the slots' own sizes.
    block_bytes: large blocks matter more than the interface: 8 MiB reaches fio's best. Each thread owns one more block for unaligned memory.
    direct_io: False goes through the page cache: slower writes, and the kernel's memory in addition to the pool, but it works on every
        filesystem.

    Raises ValueError naming key, value and fix for values that cannot work.
    """

    changes: ClassVar = Changes.experiment

    optimizer: Tier = key(
        "tier of the optimizer states: none (the device), cpu (main memory), nvme (files)",
        default=Tier.none,
        chosen=True,
    )
    optimizer_fraction: float = key(
        "part of the optimizer states that is offloaded, in whole buckets; the rest stays on the device and is updated there",
        default=1.0,
        range=PART,
        acts=_STATES,
    )
    parameters: Tier = key(
        "tier of the parameters; auto: as offload.optimizer at stage 3, on the device below",
        default=Tier.none,
        chosen=True,
        line=ParameterTier,
    )
    nvme_path: str | None = key(
        "folder on the disk to use; null: nvme/ in the run folder, or below $SLURM_TMPDIR or $TMPDIR where that is a disk and the run folder "
        "is on a network file system",
        acts=_ANY_NVME,
        optional=True,
        changes=Changes.nothing,
        paths=Paths(),
    )
    buffer_count: int = key(
        "buffers of the pool through which shards pass",
        default=9,
        range=Range(low=MIN_BUFFER_COUNT, high=65_536),
        acts=_TRAINED_NVME,
    )
    buffer_bytes: int = key(
        "bytes of one buffer; less if the largest shard needs less", default=32 << 20, range=_PAGES, acts=_TRAINED_NVME
    )
    block_bytes: int = key(
        "bytes of one read or write. Main memory per rank is at most buffer_count * buffer_bytes + threads * block_bytes",
        default=8 << 20,
        range=_PAGES,
        acts=_NVME,
    )
    threads: int = key("concurrent reads and writes", default=4, range=Range(low=1, high=MAX_THREADS), acts=_NVME)
    pin_memory: bool = key(
        "page-locked buffers, for copies to and from a GPU; null: true", default=True, acts=_PINNED, optional=True
    )
    direct_io: bool = key("read and write past the page cache (O_DIRECT)", default=True, acts=_NVME)

    def __post_init__(self) -> None:
        for name in ("optimizer", "parameters"):
            object.__setattr__(self, name, member(getattr(self, name), of=Tier, key=f"offload.{name}"))
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        if self.uses_nvme and not self.nvme_path:
            yield "offload.nvme_path is empty, but nvme offload needs a folder: set offload.nvme_path=FOLDER"
        yield from key_faults(self, section="offload")
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


@section
class OffloadConfig(OffloadPolicy):
    """Where a rank's shards are stored between their uses."""


def page_faults(offload: OffloadChoices) -> Iterator[str]:
    """Buffers and blocks are multiples of a page."""
    for name in ("buffer_bytes", "block_bytes"):
        value = getattr(offload, name)
        if value is not None and value >= 1 and value % PAGE_BYTES:
            yield (
                f"offload.{name}={value}: must be a multiple of {PAGE_BYTES}, as direct I/O needs; use "
                f"offload.{name}={-(-value // PAGE_BYTES) * PAGE_BYTES}"
            )
