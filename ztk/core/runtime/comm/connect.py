"""Chooses the transport of a group of ranks and connects it."""

import datetime
import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ztk.core.runtime.comm.comm import Comm
from ztk.core.runtime.comm.gloo import GlooTransport
from ztk.core.runtime.comm.nccl import NcclTransport
from ztk.core.runtime.comm.shared_memory import SharedMemoryTransport
from ztk.core.runtime.comm.transport import SingleRankTransport, Transport
from ztk.core.runtime.comm.watchdog import Watchdog

PATIENCE_SECONDS = 60.0  # the watchdog compares labels when a collective takes longer
_connected = itertools.count()  # the same number on all ranks: they connect in the same order


def backend_of(device: torch.device) -> str:
    """The torch.distributed backends for tensors on `device` and in host memory, as one string."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def default_store() -> dist.Store:
    """The store over which the ranks of the running process group met."""
    return dist.distributed_c10d._get_default_store()


def connect(*, device: torch.device, one_node: bool, timeout_seconds: float) -> Comm:
    """Connects all ranks of the running process group. A collective call: every rank makes it."""
    group, number = _of_all_ranks(device, timeout_seconds=timeout_seconds), next(_connected)
    transport = _transport(group, device=device, one_node=one_node, timeout_seconds=timeout_seconds)
    return _comm(
        transport,
        ranks=range(group.size()),
        rank=group.rank(),
        device=device,
        timeout_seconds=timeout_seconds,
        number=number,
    )


def _of_all_ranks(device: torch.device, *, timeout_seconds: float) -> dist.ProcessGroup:
    """The process group of all ranks. If a script initialised nccl alone, creates a group with a CPU backend too: the shapes of pipeline
    messages and background checkpoints are exchanged on the host."""
    group = dist.group.WORLD
    assert group is not None, "this process has joined"
    if group.size() > 1 and torch.device("cpu") not in group._device_types:
        group = dist.new_group(backend=backend_of(device), timeout=datetime.timedelta(seconds=timeout_seconds))
        assert isinstance(group, dist.ProcessGroup), "of all ranks"
    return group


def connect_groups(
    groups: Sequence[Sequence[int]], *, device: torch.device, local_world_size: int, timeout_seconds: float
) -> Comm:
    """This rank's `Comm` for a partition of the world into `groups`. A collective call: every rank makes it with the same groups."""
    number = next(_connected)
    rank, timeout = dist.get_rank(), datetime.timedelta(seconds=timeout_seconds)
    own = next(group for group in groups if rank in group)
    if len(own) == 1:  # then all are: the groups have equal sizes
        return Comm(SingleRankTransport(), rank=0, size=1, device=device)
    backend = backend_of(device)  # independent of the backend that a script initialised
    # Not by local synchronisation: it names a group by its ranks and the number of living groups, so the next group of the same ranks would
    # find the addresses of a destroyed one. A call for a group of other ranks takes 23 microseconds and sends nothing.
    made = {tuple(ranks): dist.new_group(list(ranks), timeout=timeout, backend=backend) for ranks in groups}
    one_node = len({member // local_world_size for member in own}) == 1
    transport = _transport(made[tuple(own)], device=device, one_node=one_node, timeout_seconds=timeout_seconds)
    if isinstance(transport, SharedMemoryTransport):
        # The group was needed only to connect the ranks. Its threads poll: a hundred of them used half a core.
        # Safe to destroy: every rank sent its memory after the group's last collective.
        dist.destroy_process_group(made[tuple(own)])
    return _comm(
        transport, ranks=own, rank=own.index(rank), device=device, timeout_seconds=timeout_seconds, number=number
    )


def _comm(
    transport: Transport,
    *,
    ranks: Sequence[int],
    rank: int,
    device: torch.device,
    timeout_seconds: float,
    number: int,
) -> Comm:
    """Builds a `Comm`, with a watchdog if the transport cannot check labels. number: index of the call to connect, equal on all ranks."""
    watchdog = None
    if not transport.checks_labels:
        watchdog = Watchdog(
            default_store(),
            number=number,
            rank=rank,
            ranks=ranks,
            patience=min(PATIENCE_SECONDS, timeout_seconds / 4),
            ends_process=not transport.blocking,
        )
    return Comm(transport, rank=rank, size=len(ranks), device=device, watchdog=watchdog)


def _transport(group: dist.ProcessGroup, *, device: torch.device, one_node: bool, timeout_seconds: float) -> Transport:
    if group.size() == 1:
        return SingleRankTransport()
    if device.type == "cuda":
        return NcclTransport(group=group)
    if one_node:
        return SharedMemoryTransport(group=group, timeout_seconds=timeout_seconds)
    if group is not dist.group.WORLD:
        return GlooTransport(group=group)
    timeout = datetime.timedelta(seconds=timeout_seconds)
    return GlooTransport(group=dist.new_group(backend="gloo", timeout=timeout))
