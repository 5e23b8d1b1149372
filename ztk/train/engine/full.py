"""One parameter of an engine, or its gradient, in full on every rank and in any layout."""

import difflib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ztk.core.runtime.part import Part
from ztk.optim.states import FROZEN, GRADIENT, MASTER
from ztk.zero.buckets.bucket import Bucket

if TYPE_CHECKING:
    from ztk.train.engine.engine import Engine

NO_GRADIENT = "full_grad({name!r}): there is no gradient now; call it in the hook before_update, or before step() ends the last micro-batch"


def is_cut(engine: "Engine") -> bool:
    """Returns whether tensor, pipeline or expert parallelism gives ranks different parts of the model."""
    topology = engine.process.mesh.topology
    return max(topology.tensor, topology.expert, topology.pipeline) > 1


def full_value(engine: "Engine", *, name: str, is_gradient: bool) -> Tensor:
    """Returns the parameter `name`, or its gradient as reduced, still scaled and summed: fp32, in the full shape. A collective call.

    Raises, on every rank, ValueError for a name without such a parameter, and RuntimeError if there is no gradient now.
    """
    bucket, value = _bucket_of(engine, name=name), None
    if bucket is not None and not (is_gradient and not bucket.traits.trainable):
        kind = GRADIENT if is_gradient else MASTER if bucket.traits.trainable else FROZEN
        value = engine.zero.named_state.read(bucket, name=name, kind=kind)
    part = None if bucket is None else engine.zero.state.part_of(name, bucket=bucket)
    is_frozen = bucket is not None and not bucket.traits.trainable
    if not is_cut(engine):
        _check(
            engine,
            name=name,
            exists=bucket is not None,
            is_frozen=is_frozen and is_gradient,
            has_value=value is not None,
        )
        assert value is not None
        return value
    comm, stage = engine.process.comm, engine.process.mesh.comm("pp").rank
    everyone = comm.gather_objects(None if part is None else (part, stage, is_frozen, value is not None))
    holding = [found for found in everyone if found is not None]
    _check(
        engine,
        name=name,
        exists=bool(holding),
        is_frozen=is_gradient and any(found[2] for found in holding),
        has_value=all(found[3] for found in holding),
    )
    full = torch.zeros(holding[0][0].full_shape, dtype=torch.float32, device=comm.device)
    seen: set[tuple] = set()
    for rank, found in enumerate(everyone):
        if found is None:
            continue
        own: Part = found[0]
        adds_up = is_gradient and bool(own.holders)  # the stages' gradients of a copied parameter are summed later
        key = (own.start, own.shape, found[1] if adds_up else None)
        if key in seen:
            continue
        seen.add(key)
        box = torch.empty(own.shape, dtype=torch.float32, device=comm.device)
        if comm.rank == rank:
            assert value is not None
            box.copy_(value)
        if box.numel():
            comm.broadcast(box.view(-1), source=rank, label=name).wait()
        place = own.of(full)
        place.add_(box) if adds_up else place.copy_(box)
    return full


def _bucket_of(engine: "Engine", *, name: str) -> Bucket | None:
    for bucket in engine.zero.buckets:
        if any(placement.name == name for placement in bucket.layout.placements):
            return bucket
    return None


def _check(engine: "Engine", *, name: str, exists: bool, is_frozen: bool, has_value: bool) -> None:
    if not exists:
        known = [placement.name for bucket in engine.zero.buckets for placement in bucket.layout.placements]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}" if near else ""
        raise ValueError(
            f"{name!r}: the model has no parameter of this name{hint}. Tied parameters have their first name"
        )
    if is_frozen:
        raise ValueError(f"full_grad({name!r}): the parameter is frozen and has no gradient")
    if not has_value:
        raise RuntimeError(NO_GRADIENT.format(name=name))
