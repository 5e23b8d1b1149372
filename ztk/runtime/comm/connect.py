"""Which transport a group of ranks uses."""

import datetime

import torch
import torch.distributed as dist

from ztk.runtime.comm.comm import Comm
from ztk.runtime.comm.gloo import GlooTransport
from ztk.runtime.comm.nccl import NcclTransport
from ztk.runtime.comm.shared_memory import SharedMemoryTransport
from ztk.runtime.comm.transport import Alone, Transport


def connect(*, device: torch.device, one_node: bool, timeout_seconds: float) -> Comm:
    """Connects all ranks of the running process group. A collective call: every rank makes it."""
    group = dist.group.WORLD
    return Comm(
        _transport(group, device=device, one_node=one_node, timeout_seconds=timeout_seconds),
        rank=group.rank(),
        size=group.size(),
        device=device,
    )


def _transport(group: dist.ProcessGroup, *, device: torch.device, one_node: bool, timeout_seconds: float) -> Transport:
    if group.size() == 1:
        return Alone()
    if device.type == "cuda":
        return NcclTransport(group=group)
    if one_node:
        return SharedMemoryTransport(group=group, timeout_seconds=timeout_seconds)
    timeout = datetime.timedelta(seconds=timeout_seconds)
    return GlooTransport(group=dist.new_group(backend="gloo", timeout=timeout))
