"""Reads and changes one parameter's state by name, in fp32, for inspection and manual changes.

Full access is a collective call. For a read, every rank fills in the range that it stores, and the sum over ranks is the full state. For a
write, every rank has the full new values and sets its own pieces from them. Local access covers this rank's elements only, without the
other ranks.
A kind of state is "master", a name of the optimizer's states, "parameter" for a frozen parameter, or "gradient": the gradient as
reduced, still scaled and summed, while a step is due.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ztk.optim.states import FROZEN, GRADIENT, MASTER
from ztk.zero.buckets.bucket import Bucket
from ztk.zero.buckets.context import ZeroContext
from ztk.zero.buckets.piece import Piece
from ztk.zero.gathering import Gathering
from ztk.zero.reduction import GradientReduction
from ztk.zero.update.piece_states import PieceStates
from ztk.zero.update.update import ShardUpdate

WEIGHTS = (MASTER, FROZEN)


class NamedState:
    """Reads and changes the state of single parameters."""

    def __init__(
        self, context: ZeroContext, *, update: ShardUpdate, reduction: GradientReduction, gathering: Gathering
    ) -> None:
        self._states, self._update = PieceStates(context), update
        self._reduction, self._gathering = reduction, gathering

    def has_gradient(self, bucket: Bucket) -> bool:
        """Whether the gradients of `bucket` are reduced and a step is due."""
        self._reduction.settle()
        return bucket.gradient.is_reduced

    def read(self, bucket: Bucket, *, name: str, kind: str) -> Tensor | None:
        """The state, fp32, in the parameter's shape. None for a gradient unless a step is due. A collective call."""
        local = self.read_local(bucket, name=name, kind=kind)
        if local is None:
            return None
        comm, placement, own = bucket.comm, bucket.layout.placement(name), bucket.local_range(name)
        full = torch.zeros(-(-placement.numel // comm.size) * comm.size, dtype=torch.float32, device=comm.device)
        full[own.start : own.stop] = local
        comm.all_reduce(full, label=name).wait()
        return full[: placement.numel].view(placement.shape)

    def read_local(self, bucket: Bucket, *, name: str, kind: str) -> Tensor | None:
        """fp32 [len(bucket.local_range(name))]: the elements in this rank's shard, perhaps none. None for a gradient unless a step is due."""
        if kind == GRADIENT:
            if not self.has_gradient(bucket):
                return None
        else:
            self._update.finish()
        found = [torch.zeros(0, dtype=torch.float32)]
        for piece in bucket.own_pieces:
            for fragment in piece.fragments:
                if fragment.name == name:
                    found.append(self._read_range(bucket, piece=piece, kind=kind, place=fragment.place))
        return torch.cat([values.to(bucket.comm.device) for values in found])

    def write(self, bucket: Bucket, *, values: dict[str, Tensor], kind: str) -> None:
        """Sets state `kind` of the parameters in `values` (any shape, the same on all ranks). A collective call.

        Weights: if a value equals the cast of the current master weight, the master keeps its precision.
        Gradients: the norm is updated; a step must be due.
        """
        flat = {name: value.detach().reshape(-1) for name, value in values.items()}
        self._write(bucket, flat=flat, kind=kind, pieces=bucket.pieces)

    def write_local(self, bucket: Bucket, *, name: str, kind: str, value: Tensor) -> None:
        """Sets the elements that `read_local` reads, from stage 1 on. value: these elements, in any shape.

        A local call, unless it sets the weight of a bucket that is never sharded: then all ranks must make it.
        """
        own = bucket.local_range(name)
        flat = torch.zeros(bucket.layout.placement(name).numel, dtype=torch.float32)
        flat[own.start : own.stop] = value.detach().reshape(-1).to("cpu", torch.float32)
        self._write(bucket, flat={name: flat}, kind=kind, pieces=bucket.own_pieces)

    def _read_range(self, bucket: Bucket, *, piece: Piece, kind: str, place: slice) -> Tensor:
        if kind == GRADIENT:
            with self._states.gradient(bucket, piece=piece) as gradient:
                return gradient[place].to(torch.float32, copy=True)
        with self._states.reading(bucket, piece=piece) as states:
            return states[kind][place].to(torch.float32, copy=True)

    def _write(self, bucket: Bucket, *, flat: dict[str, Tensor], kind: str, pieces: list[Piece]) -> None:
        if kind == GRADIENT:
            self._write_gradient(bucket, flat=flat, pieces=pieces)
            return
        self._update.finish()
        for piece in pieces:
            if any(fragment.name in flat for fragment in piece.fragments):
                if kind in WEIGHTS:
                    self._write_weights(bucket, piece=piece, flat=flat)
                else:
                    with self._states.changing(piece) as rows:
                        _copy_fragments(flat, piece=piece, out=rows[kind])
        if kind in WEIGHTS:
            self._gathering.full_parameters_change(bucket, names=flat)
            bucket.share_parameters()

    def _write_weights(self, bucket: Bucket, *, piece: Piece, flat: dict[str, Tensor]) -> None:
        with self._states.reading(bucket, piece=piece) as states:
            weights = next(iter(states.values())).to("cpu", torch.float32, copy=True)
        new = weights.clone()
        _copy_fragments(flat, piece=piece, out=new)
        unchanged = weights.to(bucket.traits.dtype).float() == new
        self._states.set_master(bucket, piece=piece, values=torch.where(unchanged, weights, new))

    def _write_gradient(self, bucket: Bucket, *, flat: dict[str, Tensor], pieces: list[Piece]) -> None:
        bucket.gradient.record_squares(self._rewritten(bucket, flat=flat, pieces=pieces))

    def _rewritten(self, bucket: Bucket, *, flat: dict[str, Tensor], pieces: list[Piece]) -> Iterator[Tensor]:
        """The changed gradients of the pieces whose squares this rank counts."""
        own = bucket.own_pieces
        for piece in pieces:
            with self._states.gradient(bucket, piece=piece, changes=True) as gradient:
                _copy_fragments(flat, piece=piece, out=gradient)
                if piece in own:
                    yield gradient


def _copy_fragments(flat: dict[str, Tensor], *, piece: Piece, out: Tensor) -> None:
    """Copies the piece's elements of each parameter in `flat` (flat values by name) to their places in `out` [n]."""
    for fragment in piece.fragments:
        if fragment.name in flat:
            out[fragment.place] = flat[fragment.name][fragment.start : fragment.stop]
