"""The model in a checkpoint: parameters, ties, persistent buffers, and the step control's scalars.

Buffers have any dtype; the control's scalars are fp32.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ztk.checkpoint.manifest import TensorInfo
from ztk.core.precision.names import DTYPE_NAMES
from ztk.kernels import State
from ztk.train.engine import Engine

# Scalars that are only valid for the kind of loss scaling that wrote them.
_SCALING = {State.loss_scale, State.good_steps, State.hysteresis_left}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """The full model over all ranks. own_buffers: the buffers that this rank saves, as the first rank that has them."""

    parameters: list[TensorInfo]
    buffers: list[TensorInfo]
    tied: dict[str, str]
    own_buffers: frozenset[str]

    @staticmethod
    def gather(engine: Engine) -> "ModelInfo":
        """Collects the model of all ranks, because pipeline stages have different parameters. A collective call.

        The first rank of those with equal lists sends its own: at 1,024 ranks, lists of all would be 100 MB on each.
        """
        comm = engine.process.comm
        own = parameter_infos(engine), buffer_infos(engine.module), tied_names(engine.module)
        digest = int.from_bytes(hashlib.sha256(repr(own).encode()).digest()[:7], "big")
        digests = comm.gather_numbers([digest], label="model", dtype=torch.int64)
        is_first = digests.index([digest]) == comm.rank
        lists = comm.collect_objects(own if is_first else None, label="model")
        everyone = comm.broadcast_object({rank: item for rank, item in enumerate(lists or ()) if item}, label="model")
        parameters, buffers, tied, writer = {}, {}, {}, {}
        for rank, (its_parameters, its_buffers, its_ties) in everyone.items():
            for info in its_parameters:
                parameters.setdefault(info.name, info)
            for info in its_buffers:
                buffers.setdefault(info.name, info)
                writer.setdefault(info.name, rank)
            tied |= its_ties
        mine = comm.rank
        return ModelInfo(
            parameters=list(parameters.values()),
            buffers=list(buffers.values()),
            tied=tied,
            own_buffers=frozenset(name for name, rank in writer.items() if rank == mine),
        )


def parameter_infos(engine: Engine) -> list[TensorInfo]:
    """Returns the parameters of which this rank has a part, in the order of the model's definition."""
    infos = {}
    for bucket in engine.zero.buckets:
        for placement in bucket.layout.placements:
            infos[placement.name] = TensorInfo(
                name=placement.name,
                shape=list(engine.zero.state.part_of(placement.name, bucket=bucket).full_shape),
                dtype=DTYPE_NAMES[bucket.traits.dtype],
                trainable=bucket.traits.trainable,
            )
    return [infos[name] for name, _ in engine.module.named_parameters()]


def tied_names(module: nn.Module) -> dict[str, str]:
    """Returns further names of parameters -> first name."""
    canonical = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        name: canonical[id(parameter)]
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if name != canonical[id(parameter)]
    }


def persistent_buffers(module: nn.Module, *, every_name: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, buffer of any shape) of the buffers in a state_dict. every_name: also the further names of a buffer."""
    seen = set()
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is None or name in child._non_persistent_buffers_set or (id(buffer) in seen and not every_name):
                continue
            seen.add(id(buffer))
            yield f"{prefix}.{name}" if prefix else name, buffer


def buffer_infos(module: nn.Module) -> list[TensorInfo]:
    """Returns the persistent buffers."""
    return [
        TensorInfo(name=name, shape=list(buffer.shape), dtype=DTYPE_NAMES[buffer.dtype], trainable=False)
        for name, buffer in persistent_buffers(module)
    ]


def control_values(state: Tensor) -> dict[str, float | str]:
    """Returns the control state [8] by name. Non-finite values become strings, because JSON lacks them."""
    values = state.tolist()
    return {item.name: values[item] if math.isfinite(values[item]) else str(values[item]) for item in State}


def restore_control(state: Tensor, *, values: dict[str, float | str], with_scaling: bool) -> None:
    """Sets the control state [8]. Without `with_scaling` the run's loss scale is kept, because the checkpoint's is of another kind."""
    restored = state.tolist()
    for item in State:
        if item.name in values and (with_scaling or item not in _SCALING):
            restored[item] = float(values[item.name])
    state.copy_(state.new_tensor(restored))
