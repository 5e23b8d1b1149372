"""`mpu=`: a model whose layers the script cut over ranks itself, as Megatron does. ztk shards what each rank holds over the ranks
that hold the same.
"""

from dataclasses import replace

import torch.distributed as dist
from torch import nn

from ztk.deepspeed.started import arrange
from ztk.runtime import Process
from ztk.runtime.part import Part

_CUT = ("tensor_model_parallel", "model_parallel")  # Megatron's marks on a parameter that a rank holds a part of


def arranged(process: Process, mpu: object) -> Process:
    """The process in the mesh that `mpu` describes: get_model_parallel_world_size(), get_data_parallel_group() and their kin.

    Raises ValueError if ranks that share a model are not neighbours, which is how Megatron and ztk lay them out.
    """
    size = int(_ask(mpu, "get_tensor_model_parallel_world_size", "get_model_parallel_world_size"))
    topology = replace(process.mesh.topology, tensor=size)
    group = _ask(mpu, "get_data_parallel_group")
    if group is not None:
        theirs = dist.get_process_group_ranks(group)
        groups = topology.groups("data", world_size=process.world_size)
        if tuple(theirs) not in {tuple(ranks) for ranks in groups}:
            raise ValueError(
                f"mpu: data-parallel group {theirs} with {size} ranks per model: ztk expects ranks that share a model side by side, "
                f"groups {[list(ranks) for ranks in groups]}"
            )
    return arrange(process, topology)


def parts_of(model: nn.Module, *, process: Process) -> dict[str, Part] | None:
    """What this rank holds of the model's parameters; None if it holds all of them.

    A parameter marked by Megatron (tensor_model_parallel, or model_parallel, with partition_dim) is cut along that dimension, in order of
    ranks; the others are copies. Raises ValueError for a partition_dim that the parameter does not have.
    """
    comm = process.mesh.comm("tp")
    if comm.size == 1:
        return None
    parts = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if not any(getattr(parameter, mark, False) for mark in _CUT):
            parts[name] = Part.everything(shape, replica=comm.rank)
            continue
        dim = getattr(parameter, "partition_dim", 0)
        if not 0 <= dim < len(shape):
            raise ValueError(
                f"mpu: parameter {name} of shape {shape} has partition_dim={dim}; set the one it is cut along"
            )
        full_shape = (*shape[:dim], shape[dim] * comm.size, *shape[dim + 1 :])
        start = comm.rank * shape[dim]
        parts[name] = Part.cut(full_shape, dim=dim, start=start, stop=start + shape[dim])
    return parts


def _ask(mpu: object, *names: str) -> object:
    for name in names:
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    raise ValueError(
        f"mpu={type(mpu).__name__}: has no {names[-1]}(); ztk asks it for the ranks of the model and of the data"
    )
