"""Stores reduced gradient shards and accumulates them over micro-batches.

Shards have the dtype in which gradients are sent.
"""

from collections import deque

import torch
from torch import Tensor

from ztk.core.runtime import PhaseClock, Tier
from ztk.core.runtime.buffers import BufferPool
from ztk.core.runtime.pending import Pending
from ztk.zero.buckets.bucket import Bucket

MAX_WRITES = 2  # shards whose buffers are being written at one time


class ReducedShards:
    """The reduced shards of buckets whose gradients are sharded (stages 2 and 3), in their pieces' stores."""

    def __init__(self, *, pool: BufferPool, clock: PhaseClock) -> None:
        """pool: holds buffers for shards that no store keeps on the device."""
        self._pool, self._clock = pool, clock
        self._writes: deque[tuple[list[Pending], Tensor]] = deque()  # with the shards that they write

    def acquire(self, bucket: Bucket, *, dtype: torch.dtype) -> Tensor:
        """Memory [shard_size] for a sum: the stored shard itself if it is on the device and empty, else a buffer of the pool."""
        if _is_on_device(bucket) and not bucket.gradient.has_earlier:
            return _stored(bucket)
        return self._pool.acquire(bucket.layout.shard_size, dtype=dtype)

    def release(self, bucket: Bucket, *, shard: Tensor) -> None:
        """Drops a sum from `acquire`."""
        if not (_is_on_device(bucket) and shard is _stored(bucket)):
            self._pool.release(shard)

    def accumulate(self, bucket: Bucket, *, shard: Tensor, is_last: bool) -> None:
        """Adds a reduced shard [shard_size] to earlier micro-batches' and stores the sum. is_last: computes the sum's squares."""
        bucket.residency.wait_for_update()  # an optimizer that runs during the forward may still read the last step's gradient
        on_device = _is_on_device(bucket)
        total = self._add_on_device(bucket, shard=shard) if on_device else self._add_earlier(bucket, shard=shard)
        bucket.gradient.has_earlier = True
        if is_last:
            bucket.gradient.record_squares([total])
        if not on_device:
            self._write_back(bucket, shard=shard)

    def settle(self) -> None:
        """Waits until all shards are stored."""
        while self._writes:
            self._finish_write()

    def _add_on_device(self, bucket: Bucket, *, shard: Tensor) -> Tensor:
        total = _stored(bucket)
        if total is not shard:
            total.add_(shard)
            self._pool.release(shard)
        return total

    def _add_earlier(self, bucket: Bucket, *, shard: Tensor) -> Tensor:
        if not bucket.gradient.has_earlier:
            return shard
        earlier = self._pool.acquire(shard.numel(), dtype=shard.dtype)
        start = bucket.pieces[0].start
        with self._clock.phase("io"):
            for piece in bucket.pieces:
                place = earlier[piece.start - start : piece.stop - start]
                piece.stores.gradients.fetch_into(piece.gradient, out=place).wait()
        shard.add_(earlier)
        self._pool.release(earlier)
        return shard

    def _write_back(self, bucket: Bucket, *, shard: Tensor) -> None:
        """Starts the writes; `shard` returns to the pool when they are done."""
        start = bucket.pieces[0].start
        puts = [
            piece.stores.gradients.put(piece.gradient, value=shard[piece.start - start : piece.stop - start])
            for piece in bucket.pieces
        ]
        self._writes.append((puts, shard))
        while len(self._writes) > MAX_WRITES:
            self._finish_write()

    def _finish_write(self) -> None:
        puts, shard = self._writes.popleft()
        with self._clock.phase("io"):
            for put in puts:
                put.wait()
        self._pool.release(shard)


def _is_on_device(bucket: Bucket) -> bool:
    return bucket.pieces[0].stores.gradients.tier is Tier.device


def _stored(bucket: Bucket) -> Tensor:
    """The stored shard [shard_size] of a bucket on the device, which is one piece."""
    (piece,) = bucket.pieces
    return piece.stores.gradients.fetch(piece.gradient).wait()
