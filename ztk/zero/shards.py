"""Stores reduced gradient shards and accumulates them over micro-batches.

Shards have the dtype in which gradients are sent.
"""

from collections import deque

import torch
from torch import Tensor

from ztk.core.runtime import PhaseClock, Tier
from ztk.core.runtime.buffers import BufferPool
from ztk.core.runtime.pending import Pending
from ztk.core.runtime.store import Store
from ztk.zero.buckets.bucket import Bucket

MAX_WRITES = 2  # shards whose buffers are being written at one time


class ReducedShards:
    """The reduced shards of buckets whose gradients are sharded (stages 2 and 3), in `store`."""

    def __init__(self, store: Store, *, pool: BufferPool, clock: PhaseClock) -> None:
        """pool: of buffers for shards that the store does not keep on the device."""
        self._store, self._pool, self._clock = store, pool, clock
        self._on_device = store.tier is Tier.device
        self._writes: deque[tuple[list[Pending], Tensor]] = deque()  # with the shards that they write

    def acquire(self, bucket: Bucket, *, dtype: torch.dtype) -> Tensor:
        """Memory [shard_size] for a sum: the stored shard itself if it is on the device and empty, else a buffer of the pool."""
        if self._on_device and not bucket.gradient.has_earlier:
            return self._stored(bucket)
        return self._pool.acquire(bucket.layout.shard_size, dtype=dtype)

    def release(self, bucket: Bucket, *, shard: Tensor) -> None:
        """Drops a sum from `acquire`."""
        if not (self._on_device and shard is self._stored(bucket)):
            self._pool.release(shard)

    def accumulate(self, bucket: Bucket, *, shard: Tensor, is_last: bool) -> None:
        """Adds a reduced shard [shard_size] to earlier micro-batches' and stores the sum. is_last: computes the sum's squares."""
        bucket.residency.wait_for_update()  # an optimizer that runs during the forward may still read the last step's gradient
        total = self._add_on_device(bucket, shard=shard) if self._on_device else self._add_earlier(bucket, shard=shard)
        bucket.gradient.has_earlier = True
        if is_last:
            bucket.gradient.record_squares([total])
        if not self._on_device:
            self._write_back(bucket, shard=shard)

    def settle(self) -> None:
        """Waits until all shards are stored."""
        while self._writes:
            self._finish_write()

    def _stored(self, bucket: Bucket) -> Tensor:
        return self._store.fetch(bucket.pieces[0].gradient).wait()

    def _add_on_device(self, bucket: Bucket, *, shard: Tensor) -> Tensor:
        total = self._stored(bucket)
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
                self._store.fetch_into(piece.gradient, out=place).wait()
        shard.add_(earlier)
        self._pool.release(earlier)
        return shard

    def _write_back(self, bucket: Bucket, *, shard: Tensor) -> None:
        """Starts the writes; `shard` returns to the pool when they are done."""
        start = bucket.pieces[0].start
        puts = [
            self._store.put(piece.gradient, value=shard[piece.start - start : piece.stop - start])
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
