"""Gradients: from autograd into flat buffers, from all ranks into shards, while the backward is still running."""

import functools
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.kernels import sum_of_squares
from ztk.runtime import Comm, MemoryLedger, PhaseClock, Tier
from ztk.zero.bucket import Bucket
from ztk.zero.buffers import BufferPool
from ztk.zero.gathering import Gathering
from ztk.zero.policy import ZeroPolicy
from ztk.zero.store import Pending, Store
from ztk.zero.units import ROOT

MAX_IN_FLIGHT = 2  # reductions whose buffers are alive at one time: one travels while the next fills


@dataclass(frozen=True, kw_only=True, slots=True)
class _InFlight:
    bucket: Bucket
    work: Pending
    local: Tensor | None  # the whole local gradient, to be given back
    is_boundary: bool  # nothing more will be added before the step
    shard: Tensor  # [shard_size], where the sum arrives


class GradientReduction:
    """Reduces each bucket once per synchronised backward, in one fixed order on all ranks.

    A bucket is reduced when it and all before it in the order are complete; what is incomplete at the end of the backward (modules that
    were not used) is reduced then, with zeros for what is missing. So ranks that used different modules still meet in the same
    collectives. The order is that of definition backwards, the root last, and after the first backward the order in which
    rank 0's buckets became complete: a bucket early in the order that completes late would hold up all others.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        *,
        policy: ZeroPolicy,
        store: Store,
        gathering: Gathering,
        comm: Comm,  # of all ranks that hold the same part of the model
        dtype: torch.dtype | None,
        pool: BufferPool,
        ledger: MemoryLedger,
        clock: PhaseClock,
    ) -> None:
        self.synchronise = True  # False: gradients add up locally (`no_sync`)
        self.is_boundary = True  # the optimizer steps after this backward
        self.on_boundary_launch: Callable[[], None] | None = (
            None  # called per bucket in the last backward before a step
        )
        self.squares: dict[Bucket, Tensor] = {}  # per bucket: sum of squares of the reduced shard, fp32 [1]
        self._buckets = buckets
        root = [bucket for bucket in buckets if bucket.traits.unit == ROOT]
        self._order = [bucket for bucket in reversed(buckets) if bucket not in root] + root
        self._plan = self._order  # what the backward that is open reduces, if it does
        self._completed: list[Bucket] | None = []  # in this order, in the first backward; None: the order is settled
        self._policy, self._store, self._gathering = policy, store, gathering
        self._comm, self._dtype, self._pool, self._ledger, self._clock = comm, dtype, pool, ledger, clock
        self._resident = dict(self._make_resident())  # stages 0 and 1: gradient buffers that stay
        self._accumulated: set[Bucket] = set()  # shards that hold gradients of earlier micro-batches
        self._in_flight: deque[_InFlight] = deque()
        self._putting: deque[tuple[list[Pending], Tensor]] = deque()  # shards on their way to host memory or NVMe
        self._launched = 0  # of the plan
        self._launched_buckets: set[Bucket] = set()
        self._backward_open = False
        self._reduced: set[Bucket] = set()  # stages 0 and 1: this step's gradients are reduced already
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(
                functools.partial(_pass_on, reduction=weakref.ref(self), bucket=number, index=index)
            )
            for number, bucket in enumerate(buckets)
            for index, parameter in enumerate(bucket.parameters)
        ]

    def detach(self) -> None:
        """The model's gradients are its own again. Idempotent."""
        for hook in self._hooks:
            hook.remove()

    # During backward

    def _on_gradient(self, parameter: Tensor, *, bucket: Bucket, index: int) -> None:
        if parameter.grad is None:  # an autograd function returned none for it; PyTorch calls the hook nevertheless
            return
        if not self._backward_open:
            self.open_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self.finish_backward)
        if bucket in self._launched_buckets:
            raise RuntimeError(
                f"{bucket.layout.placements[index].name}: a second gradient arrived after its bucket was reduced. Re-entrant "
                "activation checkpointing over tied parameters does this; use checkpoint(..., use_reentrant=False)"
            )
        bucket.accept_gradient(index, acquire=functools.partial(self._acquire, bucket))
        if bucket.is_complete:
            if self._completed is not None:
                self._completed.append(bucket)
            if self.synchronise:
                self._launch_complete()
            self._gathering.reshard(bucket)

    def open_backward(self, scope: Collection[Bucket] | None = None) -> None:
        """A backward begins; without this call the first gradient opens it.

        scope: the buckets that it completes, and reduces if it is synchronised. None: all. Gradients of others add up locally.
        """
        if self._backward_open:
            raise RuntimeError(
                "the last backward did not end (it raised): its gradients are half reduced. Call engine.discard_gradients() on "
                "every rank before the next one"
            )
        self._plan = self._order if scope is None else [bucket for bucket in self._order if bucket in scope]
        if not self._reduced.isdisjoint(self._plan):
            raise RuntimeError(
                "a second backward after this step's gradients were reduced: call engine.step() first, or run all but "
                "the last backward of the step under engine.no_sync()"
            )
        self._backward_open = True
        self._launched = 0
        self._launched_buckets.clear()
        for bucket in self._plan:
            bucket.new_backward()

    def finish_backward(self) -> None:
        """The backward is over: reduces what was not used and releases what is still gathered. Idempotent."""
        if not self._backward_open:
            return
        if self.synchronise:
            while self._launched < len(self._plan):
                self._launch(self._plan[self._launched])
            if not self._policy.shards_gradients:
                self._reduced.update(self._plan)
        self._launched_buckets.clear()
        self._gathering.reshard_all()
        self._backward_open = False
        if self.synchronise and self._completed is not None and self._plan[-1:] == self._order[-1:]:
            self._settle_order(self._completed)
            self._completed = None

    def resident_buffers(self) -> list[Tensor]:
        """The gradients that stay on the device whole, at stages 0 and 1."""
        return list(self._resident.values())

    @property
    def has_unreduced(self) -> bool:
        """Backwards without `synchronise` have left gradients on this rank."""
        return any(bucket.has_gradient and bucket not in self._reduced for bucket in self._buckets)

    def reduce_now(self) -> None:
        """Reduces, as for a boundary, what backwards without `synchronise` left on the ranks. Every rank must call it."""
        self.synchronise = self.is_boundary = True
        self.open_backward()
        self.finish_backward()

    def _settle_order(self, completed: list[Bucket]) -> None:
        """Rank 0's order of completion becomes everybody's; what it did not use comes last."""
        wanted = list(dict.fromkeys([*completed, *self._order]))
        number = {bucket: index for index, bucket in enumerate(self._buckets)}
        order = torch.tensor([number[bucket] for bucket in wanted], dtype=torch.float32, device=self._comm.device)
        agreed = self._comm.gather_scalars(order, label="order of reduction")[0].tolist()
        self._order = [self._buckets[int(index)] for index in agreed]

    def _launch_complete(self) -> None:
        while self._launched < len(self._plan) and self._plan[self._launched].is_complete:
            self._launch(self._plan[self._launched])

    def dtype_of(self, bucket: Bucket) -> torch.dtype:
        """In which its gradient travels and adds up."""
        return self._dtype or bucket.traits.dtype

    def _acquire(self, bucket: Bucket) -> Tensor:
        """A buffer for the bucket's local gradient: resident at stages 0 and 1, passing at 2 and 3."""
        if bucket.traits.shards_gradients:
            return self._pool.acquire(bucket.size, dtype=self.dtype_of(bucket))
        return self._resident[bucket]

    def _make_resident(self) -> Iterator[tuple[Bucket, Tensor]]:
        """At once and not when gradients come, which is not in the same order on all ranks."""
        for bucket in self._buckets:
            if not bucket.traits.shards_gradients:
                buffer = bucket.comm.empty(bucket.size, dtype=self.dtype_of(bucket), label=bucket.traits.name)
                self._ledger.add(tier=Tier.device, category="gradients", nbytes=buffer.nbytes)
                yield bucket, buffer

    # Reduction

    def _launch(self, bucket: Bucket) -> None:
        self._launched += 1
        self._launched_buckets.add(bucket)
        if self.is_boundary and self.on_boundary_launch is not None:
            self.on_boundary_launch()
        bucket.fill_missing(acquire=functools.partial(self._acquire, bucket))
        label = bucket.traits.name
        if self._policy.stage == 0:
            work = bucket.comm.all_reduce(bucket.gradient, label=label)
            local, shard = None, bucket.own(bucket.gradient)
        elif not bucket.traits.shards_gradients:
            shard = bucket.own(bucket.gradient)
            work = bucket.comm.reduce_scatter(bucket.gradient, out=shard, label=label)
            local = None
        else:
            while any(flight.bucket is bucket for flight in self._in_flight):  # few buckets: the last micro-batch's
                self._land(self._in_flight.popleft())
            local = bucket.forget_gradient()
            shard = self._landing_place(bucket, dtype=local.dtype)
            work = bucket.exchange.reduce_scatter(local, out=shard, label=label)
        flight = _InFlight(bucket=bucket, work=work, local=local, shard=shard, is_boundary=self.is_boundary)
        self._in_flight.append(flight)
        while len(self._in_flight) > MAX_IN_FLIGHT:
            self._land(self._in_flight.popleft())

    def _landing_place(self, bucket: Bucket, *, dtype: torch.dtype) -> Tensor:
        """The shard itself if it lies on the device and holds nothing yet, else a passing buffer."""
        if self._store.tier is Tier.device and bucket not in self._accumulated:
            return self._store.fetch(bucket.pieces[0].gradient).wait()
        return self._pool.acquire(bucket.layout.shard_size, dtype=dtype)

    def _land(self, flight: _InFlight) -> None:
        """The sum has arrived: it joins earlier micro-batches' and goes where gradients sleep."""
        bucket = flight.bucket
        with self._clock.phase("communication"):
            flight.work.wait()
        if flight.local is not None:
            self._pool.release(flight.local)
            self._keep(bucket, shard=flight.shard, is_boundary=flight.is_boundary)
        elif flight.is_boundary:
            self.squares[bucket] = sum_of_squares(flight.shard)

    def _keep(self, bucket: Bucket, *, shard: Tensor, is_boundary: bool) -> None:
        """Adds the reduced shard [shard_size] to what earlier micro-batches left, and leaves the sum where gradients sleep."""
        bucket.wait_for_update()  # an optimizer behind the forward may still read the last step's gradient
        if self._store.tier is Tier.device:
            total = self._store.fetch(bucket.pieces[0].gradient).wait()
            if total is not shard:
                total.add_(shard)
                self._pool.release(shard)
        else:
            total = shard
            if bucket in self._accumulated:
                self._add_earlier(bucket, shard=shard)
        self._accumulated.add(bucket)
        if is_boundary:
            self.squares[bucket] = sum_of_squares(total)
        if self._store.tier is not Tier.device:
            self._put_away(bucket, shard=shard)

    def _add_earlier(self, bucket: Bucket, *, shard: Tensor) -> None:
        earlier = self._pool.acquire(shard.numel(), dtype=shard.dtype)
        start = bucket.pieces[0].start
        with self._clock.phase("io"):
            for piece in bucket.pieces:
                place = earlier[piece.start - start : piece.stop - start]
                self._store.fetch_into(piece.gradient, out=place).wait()
        shard.add_(earlier)
        self._pool.release(earlier)

    def _put_away(self, bucket: Bucket, *, shard: Tensor) -> None:
        """Starts the writes; `shard` returns to the pool when they are done."""
        start = bucket.pieces[0].start
        puts = [
            self._store.put(piece.gradient, value=shard[piece.start - start : piece.stop - start])
            for piece in bucket.pieces
        ]
        self._putting.append((puts, shard))
        while len(self._putting) > MAX_IN_FLIGHT:
            self._finish_put()

    def _finish_put(self) -> None:
        puts, shard = self._putting.popleft()
        with self._clock.phase("io"):
            for put in puts:
                put.wait()
        self._pool.release(shard)

    # At the step

    def finish_step(self) -> None:
        """All sums have arrived. Raises if no backward was synchronised since the last step."""
        self.settle()
        if len(self.squares) < len(self._order):
            raise RuntimeError("step() without a synchronised backward since the last step: call backward() first")

    def settle(self) -> None:
        """What is on its way has arrived."""
        while self._in_flight:
            self._land(self._in_flight.popleft())
        while self._putting:
            self._finish_put()

    def discard(self) -> None:
        """Drops all gradients since the last step, also half reduced ones. Every rank must do so."""
        while self._in_flight:
            flight = self._in_flight.popleft()
            flight.work.wait()
            if flight.local is not None:
                self._pool.release(flight.local)
                self._release_landing(flight)
        while self._putting:
            self._finish_put()
        for bucket in self._buckets:
            if bucket.traits.shards_gradients and (local := bucket.forget_gradient()) is not None:
                self._pool.release(local)
            for parameter in bucket.parameters:
                parameter.grad = None
        self._gathering.reshard_all()
        self._backward_open = False
        self.forget()

    def _release_landing(self, flight: _InFlight) -> None:
        """A passing shard goes back to the pool; the device store's own slot stays where it is."""
        own = self._store.fetch(flight.bucket.pieces[0].gradient).wait() if self._store.tier is Tier.device else None
        if flight.shard is not own:
            self._pool.release(flight.shard)

    def forget(self) -> None:
        """The step is done; the next gradients start anew."""
        self.squares.clear()
        self._accumulated.clear()
        self._reduced.clear()
        for bucket in self._order:
            bucket.restart_gradient()


def _pass_on(parameter: Tensor, *, reduction: "weakref.ref[GradientReduction]", bucket: int, index: int) -> None:
    """A parameter's hook. autograd keeps hooks where Python's garbage collector does not look: one that held buckets, and with them
    parameters, would keep a model alive for ever after its engine was dropped."""
    alive = reduction()
    if alive is not None:
        alive._on_gradient(parameter, bucket=alive._buckets[bucket], index=index)
