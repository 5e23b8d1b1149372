"""Assembles the full model's state_dict from the shards of all ranks, in any parallel layout.

1. Every rank copies its part of the model into main memory, gathering one bucket at a time.
2. The ranks exchange the lists of their parts.
3. The first rank that has a part broadcasts it if another rank lacks it.
Weights have the model's compute dtype, buffers their own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.checkpoint.model import persistent_buffers, tied_names
from ztk.core.runtime import Comm
from ztk.core.runtime.part import Part
from ztk.train.engine import Engine
from ztk.train.engine.full import is_cut


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """The part of a parameter or buffer that a rank holds."""

    part: Part
    dtype: torch.dtype
    trainable: bool


def full_state_dict(
    engine: Engine, *, everywhere: bool = False, exclude_frozen: bool = False
) -> dict[str, Tensor] | None:
    """Returns the full model's state_dict in main memory: on rank 0, or on all ranks with `everywhere`; None elsewhere.

    A collective call. Each rank also keeps its own parts in memory until all are assembled.

    It has the shapes of the full parameters in the model's compute dtype, tied names and persistent buffers. In contrast,
    `engine.module.state_dict()` has only this rank's parts.
    """
    comm, module = engine.process.comm, engine.module
    keeps, cut = everywhere or comm.rank == 0, is_cut(engine)
    values = {}
    for name, value in engine.zero.full_parameters():
        if keeps or cut:
            values[name] = value.detach().to("cpu", copy=True)
    held = _parameters_held(engine)
    for name, buffer in persistent_buffers(module, every_name=True):
        values[name] = buffer.detach().to("cpu", copy=True)
        held[name] = _Held(part=Part.everything(tuple(buffer.shape)), dtype=buffer.dtype, trainable=True)
    ties = tied_names(module)
    if cut:
        everyone = comm.gather_objects((held, ties))
        held = {name: item for theirs, _ in reversed(everyone) for name, item in theirs.items()}
        ties = {name: first for _, theirs in everyone for name, first in theirs.items()}
        values = _put_together(values, of_ranks=[theirs for theirs, _ in everyone], comm=comm, keeps=keeps)
    if not keeps:
        return None
    wanted = {name for name, item in held.items() if item.trainable or not exclude_frozen}
    state = {name: value for name, value in values.items() if name in wanted}
    return state | {name: state[first] for name, first in ties.items() if first in wanted}


def _parameters_held(engine: Engine) -> dict[str, _Held]:
    held = {}
    for bucket in engine.zero.buckets:
        for placement in bucket.layout.placements:
            held[placement.name] = _Held(
                part=engine.zero.state.part_of(placement.name, bucket=bucket),
                dtype=bucket.traits.dtype,
                trainable=bucket.traits.trainable,
            )
    return {name: held[name] for name, _ in engine.module.named_parameters()}


def _put_together(
    values: dict[str, Tensor], *, of_ranks: list[dict[str, _Held]], comm: Comm, keeps: bool
) -> dict[str, Tensor]:
    """Broadcasts one part at a time. Of several copies only one is sent."""
    full, seen = {}, set()
    for rank, theirs in enumerate(of_ranks):
        for name, item in theirs.items():
            part = item.part
            if (name, part.start, part.shape) in seen:
                continue
            seen.add((name, part.start, part.shape))
            box = torch.empty(part.shape, dtype=item.dtype, device=comm.device)
            if comm.rank == rank:
                box.copy_(values[name])
            if box.numel():
                comm.broadcast(box.view(-1).view(torch.uint8), source=rank, label=name).wait()
            if keeps:
                if name not in full:
                    full[name] = torch.empty(part.full_shape, dtype=item.dtype)
                part.of(full[name]).copy_(box)
    return full
