"""What a script does before `initialize`: command line arguments, and joining the other ranks."""

import argparse
import datetime

import torch

from ztk.deepspeed.started import DEFAULT_PORT, DEFAULT_TIMEOUT, join, this_process


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--deepspeed` and `--deepspeed_config`, with the old names of both, to the script's parser and returns it."""
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
    """Joins the other ranks; `initialize` does it too under a launcher. A second call does nothing.

    rank, world_size, init_method: who this rank is, for scripts that start their ranks themselves (torch.multiprocessing.spawn);
        -1 and None are what the environment says, else tcp on this machine and distributed_port.
    dist_backend: gloo or nccl; ztk takes NCCL where there are GPUs. timeout: of every collective, 10 minutes unless given.
    dist_init_required: False refuses to join: the script has done it. verbose, config and auto_mpi_discovery change nothing.
    Raises ValueError for a backend that this machine lacks, or for half of the rank's identity.
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
