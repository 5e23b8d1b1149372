"""Calls before `initialize`: command line arguments, and this rank's process, which the first call that needs it creates."""

import argparse
import datetime
import os
import socket

import torch
import torch.distributed as dist

from ztk.core.runtime import Process, Topology
from ztk.core.runtime.rendezvous import set_places

DEFAULT_PORT = 29500
DEFAULT_TIMEOUT = datetime.timedelta(seconds=600)
_process: Process | None = None
_arranged: dict[Topology, Process] = {}


def this_process(
    distributed_port: int = DEFAULT_PORT,
    *,
    dist_init_required: bool | None = None,
    timeout: datetime.timedelta = DEFAULT_TIMEOUT,
) -> Process:
    """Returns this rank's process. The first call starts it; all engines of a program share it.

    The rank comes from a launcher's environment, from the arguments of `join`, or from a process group that the script has joined itself.

    timeout: limit of every collective, fixed by the first call. Raises ValueError for dist_init_required=False before torch.distributed is
    initialised.
    """
    global _process
    if dist_init_required is False and not dist.is_initialized():
        raise ValueError("dist_init_required=False, but torch.distributed is not initialised; leave it out")
    if "MASTER_ADDR" in os.environ:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    if _process is None:
        if dist.is_initialized():
            _tell_environment()
        _process = Process.start(timeout_seconds=timeout.total_seconds())
    return _process


def arrange(process: Process, topology: Topology) -> Process:
    """Returns `process` in `topology`. A collective call.

    Connections need threads and files, so a mesh is connected once per program and shared by all engines.
    """
    found = _arranged.get(topology)
    if found is None or found.comm is not process.comm:
        found = _arranged[topology] = process.arrange(topology)
    return found


def join(
    *, rank: int, world_size: int, init_method: str | None, timeout: datetime.timedelta, distributed_port: int
) -> None:
    """Joins the process group like torch.distributed.init_process_group, for ranks started with torch.multiprocessing.

    rank, world_size: -1 reads the environment. init_method: defaults to tcp on MASTER_ADDR (default: this machine) and MASTER_PORT
    (default: distributed_port).

    Raises ValueError if only one of rank and world_size is given.
    """
    if (rank == -1) != (world_size == -1):
        raise ValueError(f"rank={rank}, world_size={world_size}: give both, or none of them under a launcher")
    if rank == -1:
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank}: must be from 0 to world_size - 1 = {world_size - 1}")
    if dist.is_initialized():
        return
    if init_method is None:
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        init_method = f"tcp://{host}:{os.environ.get('MASTER_PORT', distributed_port)}"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


def _tell_environment() -> None:
    """Sets the environment variables of a rank from the script's process group. Variables of a launcher are kept."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ.setdefault("RANK", str(rank))
    os.environ.setdefault("WORLD_SIZE", str(world))
    if "LOCAL_RANK" not in os.environ or "LOCAL_WORLD_SIZE" not in os.environ:
        hosts = [""] * world
        dist.all_gather_object(hosts, socket.gethostname())
        set_places(hosts, rank=rank)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--deepspeed` and `--deepspeed_config`, and their old names, to the script's parser and returns it."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="train with DeepSpeed's configuration")
    group.add_argument("--deepspeed_config", default=None, type=str, help="path of ds_config.json")
    group.add_argument("--deepscale", default=False, action="store_true", help="old name of --deepspeed")
    group.add_argument("--deepscale_config", default=None, type=str, help="old name of --deepspeed_config")
    return parser


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: datetime.timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Joins the other ranks. Idempotent. Under a launcher, `initialize` does the same.

    rank, world_size, init_method: for scripts that start their ranks themselves (torch.multiprocessing.spawn). By default they come from
    the environment, else tcp on this machine and distributed_port.
    dist_backend: gloo or nccl. ztk uses NCCL if there are GPUs.
    timeout: limit of every collective, 10 minutes by default.
    dist_init_required: with False, the script must have joined already.
    verbose, config, auto_mpi_discovery: accepted and ignored.

    Raises ValueError for a backend that this machine lacks, and if only one of rank and world_size is given.
    """
    del verbose, config, auto_mpi_discovery
    if dist_backend not in (None, "gloo", "nccl"):
        raise ValueError(
            f"dist_backend={dist_backend!r}: ztk uses gloo between CPUs and nccl between GPUs; leave it out"
        )
    if dist_backend == "nccl" and not torch.cuda.is_available():
        raise ValueError("dist_backend='nccl': torch sees no GPU; leave it out, or use gloo")
    timeout = DEFAULT_TIMEOUT if timeout is None else timeout
    if (rank, world_size, init_method) != (-1, -1, None) and dist_init_required is not False:
        join(
            rank=rank,
            world_size=world_size,
            init_method=init_method,
            timeout=timeout,
            distributed_port=distributed_port,
        )
    this_process(distributed_port, dist_init_required=dist_init_required, timeout=timeout)
