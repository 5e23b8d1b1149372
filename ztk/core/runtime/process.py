"""One rank of a run: its number, its device and its communicators."""

import datetime
import logging
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ztk.core.runtime.comm import Comm, connect, connect_groups
from ztk.core.runtime.comm.connect import backend_of, default_store
from ztk.core.runtime.comm.transport import SingleRankTransport
from ztk.core.runtime.mesh import AXES, Mesh, Topology
from ztk.core.runtime.rendezvous import Meeting, meet, set_places
from ztk.kernels.shared import attention_choice

logger = logging.getLogger(__name__)

_DESCRIPTORS_PER_RANK = 8  # 4.5 with tensor parallelism, more with further axes
_OWN_DESCRIPTORS = 1024  # files, shared memory, data


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A started rank. `comm` spans all ranks; in a world of one it moves nothing. `mesh` has the process groups."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    comm: Comm
    mesh: Mesh
    timeout_seconds: float

    @staticmethod
    def start(*, device: str = "auto", timeout_seconds: float = 600.0, start_seconds: float | None = None) -> "Process":
        """Reads the launcher's environment, joins the process group and connects the collectives.

        Environment: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` (all absent: a world of one), and either `ZTK_STORE`
        (path of a file that all ranks of one machine can open; no port, no race) or `MASTER_ADDR` and `MASTER_PORT`.

        timeout_seconds: seconds that a collective may wait for a rank.
        start_seconds: seconds in which all ranks must arrive here; `timeout_seconds` if None.

        Raises:
            TimeoutError: a rank that another launcher started did not arrive.
            ValueError: variables are inconsistent, or the machine lacks the requested device.
        """
        rank, world, local_rank, local_world = _read_place()
        timeout, meeting = datetime.timedelta(seconds=timeout_seconds), None
        if not dist.is_initialized():
            seconds = timeout_seconds if start_seconds is None else start_seconds
            meeting = _meeting(rank=rank, world=world, timeout=datetime.timedelta(seconds=seconds))
        if meeting is not None:
            set_places(meeting.hosts, rank=rank)
            rank, world, local_rank, local_world = _read_place()
        _allow_descriptors(world=world, rank=rank)
        chosen = _choose_device(device, local_rank=local_rank)
        if not dist.is_initialized():
            _join(rank=rank, world=world, device=chosen, timeout=timeout, meeting=meeting)
        attention_choice.agree_by(None if local_world == world else default_store())
        comm = connect(device=chosen, one_node=local_world == world, timeout_seconds=timeout_seconds)
        return Process(
            rank=rank,
            local_rank=local_rank,
            world_size=world,
            local_world_size=local_world,
            device=chosen,
            comm=comm,
            mesh=all_replicas(comm),
            timeout_seconds=timeout_seconds,
        )

    def arrange(self, topology: Topology) -> "Process":
        """This rank with its place in `topology`. A collective call: every rank makes it with the same degrees.

        Raises:
            ValueError: the degrees do not fit the number of ranks.
        """
        topology.replicas(world_size=self.world_size)
        if topology == Topology():
            return replace(self, mesh=all_replicas(self.comm))
        comms: dict[str, Comm] = {"world": self.comm}
        for axis in AXES:
            shared = topology.sharing(axis, world_size=self.world_size)
            if shared is None:
                comms[axis] = self.connect(topology.groups(axis, world_size=self.world_size))
            else:
                comms[axis] = comms[shared]
        return replace(self, mesh=Mesh(topology, world=comms.pop("world"), comms=comms))

    def connect(self, groups: Sequence[Sequence[int]]) -> Comm:
        """This rank's `Comm` for a partition of the world into `groups`. A collective call: every rank makes it with the same groups."""
        return connect_groups(
            groups,
            device=self.device,
            local_world_size=self.local_world_size,
            timeout_seconds=self.timeout_seconds,
        )

    def stop(self) -> None:
        """Waits until all ranks arrive, then closes the connections. Do not call it after a failure: exit instead."""
        self.comm.barrier()
        self.mesh.close()
        self.comm.close()
        attention_choice.agree_by(None)
        dist.destroy_process_group()


def all_replicas(comm: Comm) -> Mesh:
    """The mesh in which every rank is a data-parallel replica."""
    alone = Comm(SingleRankTransport(), rank=0, size=1, device=comm.device)
    uncut = ("data", "expert_data", "inter_node")
    return Mesh(Topology(), world=comm, comms={axis: comm if axis in uncut else alone for axis in AXES})


def _allow_descriptors(*, world: int, rank: int) -> None:
    """Raises the soft limit of open files: gloo has a socket for each pair of a group, 4,600 at 1,024 ranks, and the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS_PER_RANK * world + _OWN_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= wanted or world == 1:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    if allowed < wanted and rank == 0:
        logger.warning(
            "%d ranks may need %d open files each, and `ulimit -Hn` is %d: raise it on every node", world, wanted, hard
        )


def _read_place() -> tuple[int, int, int, int]:
    """Rank, world size, local rank, local world size. Raises ValueError at once for settings with which the other ranks would wait
    forever."""
    world = _variable("WORLD_SIZE", default=1, least=1)
    rank = _variable("RANK", default=0, most=world - 1)
    if world > 1 and "RANK" not in os.environ:
        raise ValueError(f"WORLD_SIZE={world} without RANK: set RANK to this process's number, 0 to {world - 1}")
    local_world = _variable("LOCAL_WORLD_SIZE", default=world, least=1, most=world)
    # Not bounded by LOCAL_WORLD_SIZE: it names the GPU, and the surviving ranks of a restart keep their GPUs.
    local_rank = _variable("LOCAL_RANK", default=rank)
    return rank, world, local_rank, local_world


def _variable(name: str, *, default: int, least: int = 0, most: int | None = None) -> int:
    text = os.environ.get(name, str(default))
    bounds = f"{least} or more" if most is None else f"{least} to {most}"
    if not (text.isascii() and text.isdigit()) or int(text) < least or (most is not None and int(text) > most):
        raise ValueError(
            f"{name}={text}: must be a whole number, {bounds}; start ranks by run.py or torchrun, which set it"
        )
    return int(text)


def _choose_device(device: str, *, local_rank: int) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ValueError(f"launch.device={device}: must be auto, cpu or cuda")
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("launch.device=cuda: no GPU is visible to torch; use launch.device=cpu")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"launch.ranks asks for GPU number {local_rank}, this machine has {torch.cuda.device_count()}; "
            f"use launch.ranks={torch.cuda.device_count()}, or launch.device=cpu"
        )
    torch.cuda.init()  # from here on host memory that GPUs copy is page-locked; a rank on the CPU makes no CUDA context
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _join(*, rank: int, world: int, device: torch.device, timeout: datetime.timedelta, meeting: Meeting | None) -> None:
    if meeting is not None:
        store = dist.PrefixStore(f"ztk/start/{meeting.generation}", meeting.store)
    elif path := os.environ.get("ZTK_STORE"):
        store = dist.FileStore(path, world)
    else:
        store = dist.HashStore()
    dist.init_process_group(backend_of(device), store=store, rank=rank, world_size=world, timeout=timeout)


def _meeting(*, rank: int, world: int, timeout: datetime.timedelta) -> Meeting | None:
    """Meets ranks that another launcher started. None for a single rank and for the ranks of ztk's launcher, which share a file."""
    if "ZTK_STORE" in os.environ:
        return None
    if "MASTER_ADDR" not in os.environ:
        if world > 1:
            raise ValueError(f"WORLD_SIZE={world} without ZTK_STORE or MASTER_ADDR: start ranks by run.py or torchrun")
        return None
    if "MASTER_PORT" not in os.environ:
        raise ValueError("MASTER_ADDR without MASTER_PORT: set it to a free port, the same on every rank")
    return meet("start", rank=rank, world=world, timeout=timeout)
