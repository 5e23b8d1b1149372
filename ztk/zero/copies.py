"""One gradient for parameters that several pipeline stages hold copies of, such as an embedding that is also the head.

Such a parameter is in a bucket of its own, which all its stages cut alike, so that their shards have the same elements. After the
reduction over data-parallel ranks, the first stage with a copy adds up the others' gradients in order of stages and sends the sum back. All
copies are then updated with the same numbers and remain equal. Bytes are counted as "tied": a shard in each direction.
"""

import torch
from torch import Tensor

from ztk.zero.buckets.bucket import Bucket
from ztk.zero.buckets.context import ZeroContext


class SharedGradients:
    """Adds up the gradients of the copies of `buckets`, once per step, over the pipeline ranks in `holders`."""

    def __init__(self, buckets: list[Bucket], *, context: ZeroContext) -> None:
        self._buckets = [bucket for bucket in buckets if bucket.traits.holders]
        self._comm = context.mesh.comm("pp")

    def add_up(self) -> None:
        """Runs between the last reduction of a step and the norm. A collective call of the ranks that have copies."""
        for bucket in self._buckets:
            start, stop = bucket.pieces[0].start, bucket.pieces[-1].stop
            total = torch.empty(stop - start, dtype=bucket.traits.gradient_dtype, device=self._comm.device)
            places = [(piece, total[piece.start - start : piece.stop - start]) for piece in bucket.pieces]
            for piece, place in places:
                if piece.gradient is None:
                    place.copy_(piece.of(bucket.gradient.full))
                else:
                    piece.stores.gradients.fetch_into(piece.gradient, out=place).wait()
            self._sum_over_copies(total, bucket=bucket)
            for piece, place in places:
                if piece.gradient is None:
                    piece.of(bucket.gradient.full).copy_(place)
                else:
                    piece.stores.gradients.put(piece.gradient, value=place).wait()
            own = bucket.own_pieces
            bucket.gradient.record_squares(place for piece, place in places if piece in own)

    def _sum_over_copies(self, gradient: Tensor, *, bucket: Bucket) -> None:
        """`gradient` becomes the sum over the copies, in place."""
        first, *others = bucket.traits.holders
        label = f"gradient of {bucket.layout.placements[0].name}"  # bucket numbers may differ between stages
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
