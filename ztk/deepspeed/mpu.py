"""`mpu=`: a model whose layers the script cut over ranks itself, as Megatron does. ztk shards what each rank holds over the ranks
that hold the same. Or one whose script divides sequences over ranks: those are data-parallel to ZeRO.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch.distributed as dist
from torch import nn

from ztk.core.runtime import Process
from ztk.core.runtime.part import Part
from ztk.deepspeed.started import arrange

_CUT = ("tensor_model_parallel", "model_parallel")  # Megatron's marks on a parameter that a rank holds a part of


_SEQUENCE = "get_sequence_parallel_world_size"


def arranged(process: Process, mpu: object) -> Process:
    """The process in the mesh that `mpu` describes: get_model_parallel_world_size(), get_data_parallel_group() and the like, and
    get_sequence_parallel_world_size() for neighbours that have parts of the same sequences.

    Raises ValueError if ranks that share a model are not neighbours, which is how Megatron and ztk lay them out.
    """
    sequence = int(_ask(mpu, "get_sequence_parallel_world_size")) if hasattr(mpu, _SEQUENCE) else 1
    if sequence > 1 and not hasattr(mpu, "get_data_parallel_group"):
        # Its "model parallel" ranks are those of a sequence: `ztk.deepspeed.ulysses.state`.
        return arrange(process, replace(process.mesh.topology, sequence=sequence))
    size = int(_ask(mpu, "get_tensor_model_parallel_world_size", "get_model_parallel_world_size"))
    if sequence > 1 and size > 1:
        raise ValueError(
            f"mpu: {size} tensor-parallel and {sequence} sequence-parallel ranks together are not offered; use one of them"
        )
    topology = replace(process.mesh.topology, tensor=size, sequence=sequence)
    group = _ask(mpu, "get_data_parallel_group") if sequence == 1 else None
    if group is not None:
        theirs = dist.get_process_group_ranks(group)
        groups = topology.groups("data", world_size=process.world_size)
        if tuple(theirs) not in {tuple(ranks) for ranks in groups}:
            raise ValueError(
                f"mpu: data-parallel group {theirs} with {size} ranks per model: ztk expects ranks that share a model side by side, "
                f"groups {[list(ranks) for ranks in groups]}"
            )
    return arrange(process, topology)


def in_sequences(process: Process, *, mesh_param: tuple[int, int] | None, config: Mapping[str, object]) -> Process:
    """The process in the mesh that `mesh_param` or the configuration's sequence_parallel_size and data_parallel_size ask for.

    Raises ValueError for sizes that do not give the number of ranks, and where an mpu says another.
    """
    asked = tuple(mesh_param) if mesh_param is not None else (config.get("data_parallel_size"), None)
    data, ranks = asked[0], asked[1] if mesh_param is not None else config.get("sequence_parallel_size")
    ranks = 1 if ranks is None else ranks
    names = "mesh_param" if mesh_param is not None else "(data_parallel_size, sequence_parallel_size)"
    own, world = process.mesh.topology, process.world_size
    unit = own.pipeline * own.tensor
    if data is None and isinstance(ranks, int) and ranks > 0:
        data = world // unit // ranks
    if not isinstance(data, int) or not isinstance(ranks, int) or min(data, ranks) < 1 or data * ranks * unit != world:
        raise ValueError(
            f"{names}=({data}, {ranks}): {world} ranks"
            + (f", {unit} per model," if unit > 1 else "")
            + " must be data-parallel ranks "
            f"times ranks per sequence; ({world // unit}, 1) divides no sequence"
        )
    if max(ranks, own.sequence) > 1 and config.get("tensor_parallel"):
        raise ValueError(
            f"tensor_parallel with {max(ranks, own.sequence)} ranks per sequence: not offered; leave one of them out (run.py has both)"
        )
    if ranks in (1, own.sequence):
        return process
    if own.sequence > 1:
        raise ValueError(
            f"{names}=({data}, {ranks}): mpu says {own.sequence} ranks per sequence; let both say the same"
        )
    return arrange(process, replace(own, sequence=ranks))


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
