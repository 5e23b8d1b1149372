"""One parameter's whole state, fp32, read and written by name: for looking, and for setting by hand. Collective calls.

Reading: every rank fills in the stretch it keeps, and the ranks' sums make the whole. Writing: every rank has the whole new values
and sets its own pieces from them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ztk.zero.bucket import Bucket
from ztk.zero.piece import Piece
from ztk.zero.zero import Zero


def read_whole(zero: Zero, *, bucket: Bucket, name: str, kind: str) -> Tensor:
    """fp32, the parameter's shape. kind: "master", a name of the optimizer's states, or "parameter" for a frozen one."""
    zero._update.finish()

    def stretch(piece: Piece) -> Tensor:
        try:
            return next(values for found, values in zero._piece_state(bucket, piece=piece) if found == kind).clone()
        finally:
            if piece.states is not None:
                zero._stores.optimizer.release(piece.states)

    return _assemble(zero, bucket=bucket, name=name, stretch=stretch)


def read_gradient(zero: Zero, *, bucket: Bucket, name: str) -> Tensor | None:
    """fp32, the parameter's shape: the gradient as reduced, still scaled and summed. None unless a step is due."""
    zero.reduction.settle()
    if bucket not in zero.reduction.squares:
        return None

    def stretch(piece: Piece) -> Tensor:
        if piece.gradient is None:
            return piece.of(bucket.gradient)
        try:
            return zero._stores.gradients.fetch(piece.gradient).wait().clone()
        finally:
            zero._stores.gradients.release(piece.gradient)

    return _assemble(zero, bucket=bucket, name=name, stretch=stretch)


def write_whole(zero: Zero, *, bucket: Bucket, values: dict[str, Tensor], kind: str) -> None:
    """Sets state `kind` of the parameters in `values` (any shape, the same on all ranks).

    kind "master" or "parameter": where a value is the cast of the master weight that is there, the master keeps its precision.
    """
    zero._update.finish()
    flat = {name: value.detach().reshape(-1) for name, value in values.items()}
    for piece in bucket.pieces:
        fragments = [f for f in bucket.layout.fragments(range(piece.start, piece.stop)) if f.name in flat]
        if not fragments:
            continue
        if kind in ("master", "parameter"):
            _write_weights(zero, bucket=bucket, piece=piece, fragments=fragments, flat=flat)
        else:
            _write_moment(zero, piece=piece, fragments=fragments, flat=flat, kind=kind)
    if kind in ("master", "parameter") and not bucket.traits.shards_parameters:
        bucket.comm.all_gather(bucket.full, label=bucket.traits.name).wait()


def _assemble(zero: Zero, *, bucket: Bucket, name: str, stretch: Callable[[Piece], Tensor]) -> Tensor:
    comm = bucket.comm
    placement = next(placement for placement in bucket.layout.placements if placement.name == name)
    whole = torch.zeros(-(-placement.numel // comm.size) * comm.size, dtype=torch.float32, device=comm.device)
    own = bucket.layout.shard(comm.rank)
    for piece in bucket.pieces:
        fragments = [f for f in bucket.layout.fragments(range(piece.start, piece.stop)) if f.name == name]
        if piece.start in own and fragments:
            values = stretch(piece)
            for fragment in fragments:
                offset = fragment.offset - piece.start
                whole[fragment.start : fragment.stop] = values[offset : offset + fragment.stop - fragment.start]
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
