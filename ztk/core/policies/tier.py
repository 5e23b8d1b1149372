"""The memory tiers."""

from enum import StrEnum


class Tier(StrEnum):
    """Where bytes reside. The values are the words of the command line and of DeepSpeed's `OffloadDeviceEnum`."""

    none = "none"  # not offloaded: the memory that the model computes in
    cpu = "cpu"  # main memory, pinned if there is a GPU
    nvme = "nvme"  # a file; main memory holds the buffer pool only

    device = none  # how metrics and the memory ledger name them
    host = cpu

    @property
    def label(self) -> str:
        """The tier in metrics and ledgers: device, host or nvme."""
        return {"none": "device", "cpu": "host"}.get(self.value, self.value)
