"""Parameters of which several pipeline stages hold a copy (an embedding that is also the head): one gradient for all copies.

Such a parameter lies in a bucket of its own, cut alike on all its stages, so that shards meet shards. After the reduction over data-parallel
ranks, the first stage that holds it adds up the others' gradients in order of stages and sends the sum back: all copies are
updated by the same numbers and stay the same. Bytes are counted as "tied": a shard each way.
"""

import torch
from torch import Tensor

from ztk.kernels import sum_of_squares
from ztk.runtime import Comm
from ztk.zero.bucket import Bucket
from ztk.zero.piece import Piece
from ztk.zero.reduction import GradientReduction
from ztk.zero.store import Store


class SharedGradients:
    """Adds up the gradients of `buckets`' copies, once per step. comm: of the pipeline axis, which `holders` count."""

    def __init__(self, buckets: list[Bucket], *, reduction: GradientReduction, store: Store, comm: Comm) -> None:
        self._buckets = [bucket for bucket in buckets if bucket.traits.holders]
        self._reduction, self._store, self._comm = reduction, store, comm

    def add_up(self) -> None:
        """After the last reduction of a step and before the norm. A collective call of the ranks that hold copies."""
        for bucket in self._buckets:
            whole = torch.empty(
                bucket.pieces[-1].stop - bucket.pieces[0].start,
                dtype=self._reduction.dtype_of(bucket),
                device=self._comm.device,
            )
            for piece, place in _places(bucket, whole=whole):
                self._read(piece, bucket=bucket, out=place)
            self._meet(whole, bucket=bucket)
            squares, own = torch.zeros_like(self._reduction.squares[bucket]), bucket.layout.shard(bucket.comm.rank)
            for piece, place in _places(bucket, whole=whole):
                self._write(piece, bucket=bucket, value=place)
                if piece.start in own:
                    squares += sum_of_squares(place)
            self._reduction.squares[bucket] = squares

    def _read(self, piece: Piece, *, bucket: Bucket, out: Tensor) -> None:
        """What this rank updates the piece with."""
        if piece.gradient is None:
            out.copy_(piece.of(bucket.gradient))
        else:
            self._store.fetch_into(piece.gradient, out=out).wait()

    def _write(self, piece: Piece, *, bucket: Bucket, value: Tensor) -> None:
        if piece.gradient is None:
            piece.of(bucket.gradient).copy_(value)
        else:
            self._store.put(piece.gradient, value=value).wait()

    def _meet(self, gradient: Tensor, *, bucket: Bucket) -> None:
        """`gradient` becomes the sum over the copies."""
        first, *others = bucket.traits.holders
        label = f"gradient of {bucket.layout.placements[0].name}"  # buckets may be numbered otherwise elsewhere
        if self._comm.rank != first:
            self._comm.send(gradient, to=first, label=label, kind="tied").wait()
            self._comm.recv(gradient, source=first, label=label).wait()
            return
        for other in others:
            theirs = torch.empty_like(gradient)
            self._comm.recv(theirs, source=other, label=label).wait()
            gradient.add_(theirs)
        for work in [self._comm.send(gradient, to=other, label=label, kind="tied") for other in others]:
            work.wait()


def _places(bucket: Bucket, *, whole: Tensor) -> list[tuple[Piece, Tensor]]:
    """Each piece with its stretch of `whole`; other stages may have cut their pieces elsewhere."""
    start = bucket.pieces[0].start
    return [(piece, whole[piece.start - start : piece.stop - start]) for piece in bucket.pieces]
