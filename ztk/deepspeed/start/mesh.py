"""Determines the ranks that share a model: from the script's `mpu`, which cuts layers itself like Megatron, from sequence parallelism,
and from `tp_model_init`. ztk shards each rank's part over the ranks with the same part.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ztk.core.runtime import Process
from ztk.core.runtime.part import Part
from ztk.deepspeed.config import DeepSpeedConfigError, Settings, read_source
from ztk.deepspeed.start.process import arrange

_CUT = ("tensor_model_parallel", "model_parallel")  # Megatron's marks on a parameter of which a rank has a part


_SEQUENCE = "get_sequence_parallel_world_size"


def arranged(process: Process, mpu: object) -> Process:
    """Returns the process in the mesh that `mpu` describes, by get_model_parallel_world_size(), get_data_parallel_group() and the like.

    get_sequence_parallel_world_size() gives the number of neighbours with parts of the same sequences.

    Raises ValueError if ranks that share a model are not neighbours, which is the layout of Megatron and ztk.
    """
    sequence = int(_ask(mpu, _SEQUENCE)) if hasattr(mpu, _SEQUENCE) else 1
    if sequence > 1 and not hasattr(mpu, "get_data_parallel_group"):
        # Its "model parallel" ranks share a sequence: `ztk.deepspeed.ulysses.state`.
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
    """Returns the process in the mesh of `mesh_param`, or of the configuration's sequence_parallel_size and data_parallel_size.

    Raises ValueError for sizes that do not give the number of ranks, and if an mpu differs.
    """
    names = "mesh_param" if mesh_param is not None else "(data_parallel_size, sequence_parallel_size)"
    data, ranks = mesh_param or (config.get("data_parallel_size"), config.get("sequence_parallel_size"))
    ranks = 1 if ranks is None else ranks
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
        raise ValueError(f"{names}=({data}, {ranks}): mpu has {own.sequence} ranks per sequence; make them equal")
    return arrange(process, replace(own, sequence=ranks))


def parts_of(model: nn.Module, *, process: Process) -> dict[str, Part] | None:
    """Returns this rank's parts of the model's parameters, or None if it has all of them.

    A parameter with Megatron's marks (tensor_model_parallel, or model_parallel, with partition_dim) is cut along that dimension, in order
    of ranks; the others are copies. Raises ValueError for a partition_dim that the parameter does not have.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    tp_size: int
    dtype: torch.dtype


_asked: WeakIdKeyDictionary = WeakIdKeyDictionary()  # model -> _Asked


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype, config: object = None, tp_group: None = None
) -> nn.Module:
    """Records for `initialize(model=model, ...)` that `tp_size` ranks share its layers, in `dtype`. Returns the unchanged model.

    config: accepted and ignored; the configuration of `initialize` must agree.
    Raises ValueError for a process group, because neighbouring ranks share a model.
    """
    del config
    if tp_group is not None:
        raise ValueError("tp_group: tp_size determines the groups; leave it out")
    if tp_size < 1:
        raise ValueError(f"tp_size={tp_size}: must be 1 or more")
    _asked[model] = _Asked(tp_size=tp_size, dtype=dtype)
    return model


def with_asked_degree(source: object, *, model: nn.Module) -> object:
    """Returns `initialize`'s configuration, completed by the arguments of `tp_model_init`.

    Raises DeepSpeedConfigError if it has another number of ranks.
    """
    asked = _asked.get(model)
    if asked is None:
        return source
    given = read_source(source)
    section = dict(given.get("tensor_parallel") or {})
    inner = section.get("tp") or {}
    sizes = {section.get("autotp_size", 1), section.get("tp_size", 1), inner.get("tp_size", 1)} - {0, 1}
    if sizes - {asked.tp_size}:
        raise DeepSpeedConfigError(
            [f"tensor_parallel: {sorted(sizes)} ranks here, and {asked.tp_size} in tp_model_init; make them equal"]
        )
    if asked.tp_size > 1 and not sizes:
        given["tensor_parallel"] = section | {"autotp_size": asked.tp_size}
    return given


def check_asked_dtype(model: nn.Module, *, settings: Settings) -> None:
    """Raises DeepSpeedConfigError if `tp_model_init` got another dtype."""
    asked = _asked.get(model)
    if asked is not None and asked.dtype != settings.precision.dtype:
        raise DeepSpeedConfigError(
            [
                f"the configuration trains in {settings.precision.dtype}, and tp_model_init was given dtype={asked.dtype}; make them equal "
                "with the sections fp16 and bf16"
            ]
        )
