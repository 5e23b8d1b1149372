"""Where a shard is stored: in main memory or in a file, behind the `Store` protocol of `ztk.runtime.store`."""

from ztk.offload.disk import DiskError, DiskFile
from ztk.offload.engine import StoreClosed
from ztk.offload.host import HostStore
from ztk.offload.nvme import NvmeStore, PoolExhausted
from ztk.offload.probe import Filesystem, filesystem_of, probe_folder
from ztk.policies.offload import OffloadPolicy

__all__ = [
    "DiskError",
    "DiskFile",
    "Filesystem",
    "HostStore",
    "NvmeStore",
    "OffloadPolicy",
    "PoolExhausted",
    "StoreClosed",
    "filesystem_of",
    "probe_folder",
]
