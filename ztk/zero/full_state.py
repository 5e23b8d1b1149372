"""One parameter's state, fp32, read and written by name: for looking, and for setting by hand.

Whole, as collective calls: reading, every rank fills in the span it keeps, and the ranks' sums make the whole; writing, every rank has
the whole new values and sets its own pieces from them. Or the rank's own elements alone, without the others.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ztk.kernels import sum_of_squares
from ztk.zero.bucket import Bucket
from ztk.zero.piece import Piece
from ztk.zero.zero import Zero


def read_full(zero: Zero, *, bucket: Bucket, name: str, kind: str) -> Tensor:
    """fp32, the parameter's shape. kind: "master", a name of the optimizer's states, or "parameter" for a frozen one."""
    zero._update.finish()
    return _assemble(zero, bucket=bucket, name=name, span=functools.partial(_state, zero, bucket=bucket, kind=kind))


def read_gradient(zero: Zero, *, bucket: Bucket, name: str) -> Tensor | None:
    """fp32, the parameter's shape: the gradient as reduced, still scaled and summed. None unless a step is due."""
    if not _has_gradient(zero, bucket=bucket):
        return None
    return _assemble(zero, bucket=bucket, name=name, span=functools.partial(_gradient, zero, bucket=bucket))


def read_own(zero: Zero, *, bucket: Bucket, name: str, kind: str) -> Tensor:
    """As `read_full`, but local: the flat elements of the parameter that lie in this rank's shard, perhaps none."""
    zero._update.finish()
    return _own(zero, bucket=bucket, name=name, span=functools.partial(_state, zero, bucket=bucket, kind=kind))


def read_own_gradient(zero: Zero, *, bucket: Bucket, name: str) -> Tensor | None:
    """As `read_gradient`, but local: the flat elements that lie in this rank's shard, perhaps none."""
    if not _has_gradient(zero, bucket=bucket):
        return None
    return _own(zero, bucket=bucket, name=name, span=functools.partial(_gradient, zero, bucket=bucket))


def own_range(bucket: Bucket, *, name: str) -> range:
    """Which flat elements of the parameter lie in this rank's shard."""
    found = [f for f in bucket.layout.fragments(bucket.layout.shard(bucket.comm.rank)) if f.name == name]
    return range(found[0].start, found[0].stop) if found else range(0)


def write_full(zero: Zero, *, bucket: Bucket, values: dict[str, Tensor], kind: str) -> None:
    """Sets state `kind` of the parameters in `values` (any shape, the same on all ranks).

    kind "master" or "parameter": where a value is the cast of the master weight that is there, the master keeps its precision.
    """
    flat = {name: value.detach().reshape(-1) for name, value in values.items()}
    _write(zero, bucket=bucket, flat=flat, kind=kind, pieces=bucket.pieces)
    if kind in ("master", "parameter") and not bucket.traits.shards_parameters:
        bucket.comm.all_gather(bucket.full, label=bucket.traits.name).wait()


def write_own(zero: Zero, *, bucket: Bucket, name: str, kind: str, value: Tensor) -> None:
    """Sets the elements that `read_own` reads, from stage 1 on. Local, unless it is the weight of a bucket that all ranks keep whole:
    then all must call."""
    own = own_range(bucket, name=name)
    placement = next(placement for placement in bucket.layout.placements if placement.name == name)
    flat = torch.zeros(placement.numel, dtype=torch.float32)
    flat[own.start : own.stop] = value.detach().reshape(-1).to("cpu", torch.float32)
    _write(zero, bucket=bucket, flat={name: flat}, kind=kind, pieces=_own_pieces(bucket))
    if kind in ("master", "parameter") and not bucket.traits.shards_parameters:
        bucket.comm.all_gather(bucket.full, label=bucket.traits.name).wait()


def write_gradient(zero: Zero, *, bucket: Bucket, name: str, value: Tensor, start: int = 0) -> None:
    """Sets the reduced gradient, scaled and summed as `read_gradient` gives it; the norm follows. A step must be due.

    value: flat elements [start, start + n) of the parameter, all of those that this rank's pieces hold.
    """
    store = zero._stores.gradients
    squares = torch.zeros_like(zero.reduction.squares[bucket])
    own = bucket.layout.shard(bucket.comm.rank)
    for piece in bucket.pieces:
        gradient = piece.of(bucket.gradient) if piece.gradient is None else store.fetch(piece.gradient).wait()
        for fragment in bucket.layout.fragments(range(piece.start, piece.stop)):
            if fragment.name == name:
                place = gradient[fragment.offset - piece.start :][: fragment.stop - fragment.start]
                place.copy_(value[fragment.start - start : fragment.stop - start])
        if piece.start in own:
            squares += sum_of_squares(gradient).to(squares.device)
        if piece.gradient is not None:
            store.put(piece.gradient, value=gradient).wait()
    zero.reduction.squares[bucket] = squares


def _write(zero: Zero, *, bucket: Bucket, flat: dict[str, Tensor], kind: str, pieces: list[Piece]) -> None:
    zero._update.finish()
    for piece in pieces:
        fragments = [f for f in bucket.layout.fragments(range(piece.start, piece.stop)) if f.name in flat]
        if not fragments:
            continue
        if kind in ("master", "parameter"):
            _write_weights(zero, bucket=bucket, piece=piece, fragments=fragments, flat=flat)
        else:
            _write_moment(zero, piece=piece, fragments=fragments, flat=flat, kind=kind)


def _has_gradient(zero: Zero, *, bucket: Bucket) -> bool:
    zero.reduction.settle()
    return bucket in zero.reduction.squares


def _state(zero: Zero, piece: Piece, *, bucket: Bucket, kind: str) -> Tensor:
    try:
        return next(values for found, values in zero._piece_state(bucket, piece=piece) if found == kind).clone()
    finally:
        if piece.states is not None:
            zero._stores.optimizer.release(piece.states)


def _gradient(zero: Zero, piece: Piece, *, bucket: Bucket) -> Tensor:
    if piece.gradient is None:
        return piece.of(bucket.gradient)
    try:
        return zero._stores.gradients.fetch(piece.gradient).wait().clone()
    finally:
        zero._stores.gradients.release(piece.gradient)


def _own_pieces(bucket: Bucket) -> list[Piece]:
    own = bucket.layout.shard(bucket.comm.rank)
    return [piece for piece in bucket.pieces if piece.start in own]


def _own(zero: Zero, *, bucket: Bucket, name: str, span: Callable[[Piece], Tensor]) -> Tensor:
    found = [torch.zeros(0, dtype=torch.float32)]
    for piece in _own_pieces(bucket):
        fragments = [f for f in bucket.layout.fragments(range(piece.start, piece.stop)) if f.name == name]
        values = span(piece).float() if fragments else None
        found += [values[f.offset - piece.start :][: f.stop - f.start].clone() for f in fragments]
    return torch.cat([values.to(bucket.comm.device) for values in found])


def _assemble(zero: Zero, *, bucket: Bucket, name: str, span: Callable[[Piece], Tensor]) -> Tensor:
    comm = bucket.comm
    placement = next(placement for placement in bucket.layout.placements if placement.name == name)
    whole = torch.zeros(-(-placement.numel // comm.size) * comm.size, dtype=torch.float32, device=comm.device)
    own = own_range(bucket, name=name)
    whole[own.start : own.stop] = _own(zero, bucket=bucket, name=name, span=span)
    comm.all_reduce(whole, label=name).wait()
    return whole[: placement.numel].view(placement.shape)


def _write_weights(zero: Zero, *, bucket: Bucket, piece: Piece, fragments: list, flat: dict[str, Tensor]) -> None:
    kind, current = next(zero._piece_state(bucket, piece=piece))
    current = current.to("cpu", torch.float32, copy=True)
    if piece.states is not None:
        zero._stores.optimizer.release(piece.states)
    for fragment in fragments:
        new = flat[fragment.name][fragment.start : fragment.stop].to("cpu", torch.float32)
        offset = fragment.offset - piece.start
        place = current[offset : offset + fragment.stop - fragment.start]
        unchanged = place.to(bucket.traits.dtype).float() == new
        place.copy_(torch.where(unchanged, place, new))
    zero._builder.set_master(bucket, piece=piece, values=current)


def _write_moment(zero: Zero, *, piece: Piece, fragments: list, flat: dict[str, Tensor], kind: str) -> None:
    names = zero.optimizer.state_names
    store = zero._stores.optimizer
    states = store.fetch(piece.states).wait()
    row = states[states.shape[0] - len(names) + names.index(kind)]
    for fragment in fragments:
        offset = fragment.offset - piece.start
        place = row[offset : offset + fragment.stop - fragment.start]
        place.copy_(flat[fragment.name][fragment.start : fragment.stop])
    store.put(piece.states, value=states).wait()
