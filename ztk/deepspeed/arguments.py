"""What a script does before `initialize`: command line arguments, and joining the other ranks."""

import argparse

import torch

from ztk.deepspeed.entry import this_process


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
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: object = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Joins the ranks that torchrun started; `initialize` does it too. A second call does nothing.

    dist_backend: gloo or nccl; ztk takes NCCL where there are GPUs. verbose, config and auto_mpi_discovery change nothing.
    Raises ValueError for a way of joining that is not torchrun's.
    """
    del verbose, config, auto_mpi_discovery
    if dist_backend not in (None, "gloo", "nccl"):
        raise ValueError(
            f"dist_backend={dist_backend!r}: ztk speaks gloo between CPUs and nccl between GPUs; leave it out"
        )
    if dist_backend == "nccl" and not torch.cuda.is_available():
        raise ValueError("dist_backend='nccl': torch sees no GPU; leave it out, or use gloo")
    given = {"init_method": init_method, "timeout": timeout}
    given |= {name: value for name, value in (("rank", rank), ("world_size", world_size)) if value != -1}
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name}={value}: not offered; start the script with torchrun, which tells every rank who it is"
            )
    this_process(distributed_port, dist_init_required=None if dist_init_required else dist_init_required)
