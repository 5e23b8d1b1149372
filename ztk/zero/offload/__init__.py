"""Stores of shards in main memory or in a file, behind the `Store` protocol of `ztk.core.runtime.store`."""

from ztk.core.policies.offload import OffloadPolicy
from ztk.zero.offload.disk import DiskError, DiskFile
from ztk.zero.offload.host import HostStore
from ztk.zero.offload.io_engine import StoreClosed
from ztk.zero.offload.nvme import NvmeStore, PoolExhausted
from ztk.zero.offload.probe import Filesystem, filesystem_of, probe_folder

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
