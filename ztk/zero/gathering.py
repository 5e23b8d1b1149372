"""Stage 3: gathers buckets before their use and releases them after it, so that parameters are full only while they are used."""

import weakref
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ztk.core.policies.zero import MAX_LIVE_PARAMETERS
from ztk.core.runtime.dispatch_modes import without_dispatch_modes
from ztk.zero.buckets.bucket import Bucket
from ztk.zero.buckets.context import ZeroContext
from ztk.zero.buckets.residency import ParameterState


class UseTrace:
    """Uses of buckets from one start of the model to the next: forward, then backward.

    Prefetching depends on recorded uses and sizes only, never on time, so all ranks issue the same collectives in the same order.
    """

    def __init__(self) -> None:
        self._recorded: list[Bucket] = []
        self._current: list[Bucket] = []
        self._cursor = 0

    def restart(self) -> None:
        """Begins a new pass; the last one becomes the forecast."""
        if self._current:
            self._recorded = self._current
        self._current, self._cursor = [], 0

    def use(self, bucket: Bucket) -> None:
        """Records a use of `bucket`. The cursor moves past it in the forecast, or stays if the forecast has no further use of it."""
        self._current.append(bucket)
        for position in range(self._cursor, len(self._recorded)):
            if self._recorded[position] is bucket:
                self._cursor = position + 1
                return

    def ahead(self) -> Iterator[Bucket]:
        """The rest of the forecast."""
        return iter(self._recorded[self._cursor :])

    def distance_to(self, bucket: Bucket) -> int | None:
        """Elements used before the next use of `bucket`, or None if the forecast has none."""
        distance = 0
        for other in self.ahead():
            if other is bucket:
                return distance
            distance += other.size
        return None


# Limits for `prefetch_bucket_size=None`: this part of the model's elements, and at most DeepSpeed's default. At least one bucket, but none
# if buckets exceed that part: with one in use and one prefetched, such a model would hardly be sharded.
PREFETCHED_PART, MAX_PREFETCHED, LARGEST_PART = 16, 50_000_000, 8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Unit:
    """A module and the sharded buckets that it needs."""

    name: str
    module: nn.Module
    buckets: tuple[Bucket, ...]


class Gathering:
    """Gathers buckets before their use, releases them after it, and prefetches along the recorded order of uses.

    units: the root last. open_units: how many units' forwards are running.
    """

    def __init__(self, units: list[Unit], *, context: ZeroContext) -> None:
        self.units, self.open_units = units, 0
        self.changes = 0  # number of parameter changes; older graphs cannot run backward
        self.mark_updated: weakref.WeakMethod | None = None  # of `ParameterWrites`, see `full_parameters_change`
        self._policy, self._clock, self._pool = context.policy, context.clock, context.gathered
        self._buckets = list(dict.fromkeys(bucket for unit in units for bucket in unit.buckets))
        self._prefetched_elements = self._policy.prefetch_bucket_size
        if self._prefetched_elements is None:
            self._prefetched_elements = _usual_prefetch([bucket.size for bucket in self._buckets])
        self._max_live = self._policy.max_live_parameters
        if self._max_live is None:
            self._max_live = self._usual_live()
        self._by_storage: dict[int, Bucket] = {}  # identity of a full buffer's storage -> its bucket
        self._trace_with_gradients, self._trace_without = UseTrace(), UseTrace()
        self._trace = self._trace_with_gradients

    # Unshard and reshard

    def unshard(self, bucket: Bucket) -> None:
        """Makes the parameters of `bucket` usable, records the use, and starts to prefetch the next buckets."""
        if bucket.residency.is_used:
            return
        if inside_backward():
            self._release_passed()
        self._trace.use(bucket)
        self._unshard(bucket, is_exact=False)
        self._prefetch()

    def unshard_untraced(self, bucket: Bucket) -> None:
        """Gathers `bucket` outside of the model's own passes, without recording or prefetching. Float8 weights arrive in 16 bits."""
        self._unshard(bucket, is_exact=True)

    @without_dispatch_modes
    def _unshard(self, bucket: Bucket, *, is_exact: bool) -> None:
        bucket.residency.start_gather(is_exact=is_exact)
        with self._clock.phase("communication"):
            bucket.residency.finish_gather()
        assert bucket.full is not None
        self._by_storage[bucket.full.untyped_storage()._cdata] = bucket
        bucket.residency.is_used = True

    @without_dispatch_modes
    def reshard(self, bucket: Bucket, *, may_be_viewed: bool = True) -> None:
        """Releases `bucket`, unless it is never sharded or is kept across passes. may_be_viewed: see `Residency.release`."""
        residency = bucket.residency
        if not bucket.traits.shards_parameters or residency.state is ParameterState.sharded or residency.is_kept:
            return
        assert bucket.full is not None
        self._by_storage.pop(bucket.full.untyped_storage()._cdata, None)
        residency.release(may_be_viewed=may_be_viewed)

    def reshard_all(self) -> None:
        """Releases, at the end of a pass, all buckets that are gathered or prefetched and not kept."""
        for bucket in self._buckets:
            self.reshard(bucket)

    def reshard_before_change(self) -> None:
        """Releases all buckets because their parameters are about to change. Raises RuntimeError if some are pinned."""
        pinned = [bucket.traits.name for bucket in self._buckets if bucket.residency.pins]
        if pinned:
            raise RuntimeError(
                f"parameters of {', '.join(pinned)} are pinned in full, and a step or a load would leave them with old values: "
                "leave GatheredParameters before"
            )
        self.reshard_all()

    def parameters_change(self) -> None:
        """Records that the parameters take new values: earlier views read as NaN, and earlier graphs cannot run backward."""
        self.changes += 1
        self._pool.invalidate_views()
        self.full_parameters_change()

    def full_parameters_change(self, bucket: Bucket | None = None, *, names: Container[str] | None = None) -> None:
        """Records the same as `parameters_change`, for parameters that are never sharded: all trained ones, or the ones of `bucket` in
        `names`."""
        mark_updated = None if self.mark_updated is None else self.mark_updated()
        if mark_updated is not None:
            mark_updated(bucket, names=names)

    # Keep unsharded

    def pin(self, bucket: Bucket) -> None:
        """Gathers `bucket` and keeps it gathered until `unpin`, across passes of the model."""
        gathered_by_pin = not bucket.residency.pins and not bucket.residency.is_used
        self.unshard_untraced(bucket)
        bucket.residency.pin(gathered_by_pin=gathered_by_pin)

    def unpin(self, bucket: Bucket) -> None:
        """Undoes one `pin`. The last one releases the bucket if the first one gathered it and no running forward needs it."""
        if bucket.residency.unpin() and not bucket.residency.is_needed:
            self.reshard(bucket)

    @contextmanager
    def keep_unsharded(self) -> Iterator[None]:
        """Context in which buckets are gathered once for many passes and stay gathered, as many as `max_kept_parameters` allows.

        The others are gathered for every pass. Room for the largest unit, and for a prefetched unit of that size, is kept free.
        """
        limit, largest = self._policy.max_kept_parameters, max(map(_size, self.units), default=0)
        room = limit if sum(bucket.size for bucket in self._buckets) <= limit else limit - 2 * largest
        for bucket in self._buckets:
            room -= bucket.size
            bucket.residency.stays = room >= 0
        try:
            yield
        finally:
            for bucket in self._buckets:
                bucket.residency.stays = False
            self.reshard_all()

    # Forward

    @contextmanager
    def open(self, unit: Unit, *, is_root: bool) -> Iterator[None]:
        """Runs a forward of `unit`: its buckets are gathered inside, and released afterwards if nothing else needs them."""
        recomputing = inside_backward()
        if is_root and not recomputing:
            self._trace = self._trace_with_gradients if torch.is_grad_enabled() else self._trace_without
            self._trace.restart()
        for bucket in unit.buckets:
            bucket.residency.open_units += 1
            self._start_gather(bucket)
        for bucket in unit.buckets:
            self.unshard(bucket)
        self.open_units += 1
        try:
            yield
        finally:
            self.open_units -= 1
            for bucket in unit.buckets:
                bucket.residency.open_units -= 1
            if not recomputing:  # the backward follows a recomputed forward at once
                self._after_forward(unit, is_root=is_root)

    def _after_forward(self, unit: Unit, *, is_root: bool) -> None:
        if is_root:
            for bucket in self._buckets:
                bucket.residency.has_returned_view = False
        for bucket in self._buckets if is_root else unit.buckets:
            if bucket.residency.is_used and not bucket.residency.is_needed:
                if self._is_reused_soon(bucket):
                    bucket.residency.is_used = False  # so that the next use is recorded
                else:
                    self.reshard(bucket)
        if is_root and not torch.is_grad_enabled():  # no backward follows
            self.reshard_all()

    def bucket_under(self, tensor: Tensor) -> Bucket | None:
        """The gathered bucket that `tensor` (any shape) is a view of, or None."""
        if not self._by_storage or tensor.layout is not torch.strided:
            return None
        try:
            return self._by_storage.get(tensor.untyped_storage()._cdata)
        except NotImplementedError:  # inside torch.vmap
            return None

    # Prefetching

    def _is_reused_soon(self, bucket: Bucket) -> bool:
        distance = self._trace.distance_to(bucket)
        within = distance is not None and 0 < self._policy.max_reuse_distance >= distance
        return within and self._pool.elements_in_use <= self._max_live

    def _release_passed(self) -> None:
        """Releases frozen buckets that the backward does not use again. They have no gradient whose completion would release them."""
        for bucket in self._buckets:
            is_idle = bucket.residency.is_used and not bucket.residency.open_units
            if is_idle and not bucket.traits.trainable and self._trace.distance_to(bucket) is None:
                self.reshard(bucket)

    def _prefetch(self) -> None:
        budget = self._prefetched_elements
        for bucket in self._trace.ahead():
            if bucket.residency.is_used:
                continue
            if budget <= 0 or self._pool.elements_in_use + bucket.size > self._max_live:
                return
            self._start_gather(bucket)
            budget -= bucket.size  # after the start: a budget smaller than a bucket still prefetches one bucket

    def _usual_live(self) -> int:
        """Elements. The buckets in use and one more prefetch always fit."""
        *blocks, root = map(_size, self.units) if self.units else [0]
        in_use = root + max(blocks, default=0) + self._prefetched_elements
        return min(MAX_LIVE_PARAMETERS, max(sum(bucket.size for bucket in self._buckets) // 2, in_use))

    @without_dispatch_modes
    def _start_gather(self, bucket: Bucket) -> None:
        bucket.residency.start_gather()


def _size(unit: Unit) -> int:
    return sum(bucket.size for bucket in unit.buckets)


def _usual_prefetch(sizes: list[int]) -> int:
    """Elements to prefetch, from the sizes of the model's buckets."""
    if max(sizes, default=0) > sum(sizes) // LARGEST_PART:
        return 0
    return min(MAX_PREFETCHED, max(1, sum(sizes) // PREFETCHED_PART))


def inside_backward() -> bool:
    """Whether autograd is running on this thread."""
    return torch._C._current_graph_task_id() != -1
