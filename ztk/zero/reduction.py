"""Collects gradients from autograd in flat buffers and reduces them into shards while the backward is still running.

Gradients have the dtype in which they are sent.
"""

import functools
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ztk.core.runtime import MemoryLedger, Tier
from ztk.core.runtime.buffers import BufferPool
from ztk.core.runtime.gradient_places import offer_place, withdraw_place
from ztk.core.runtime.pending import Pending
from ztk.zero.buckets.bucket import Bucket
from ztk.zero.buckets.context import ZeroContext
from ztk.zero.buckets.gradient import gradient_of, set_gradient
from ztk.zero.buckets.units import ROOT
from ztk.zero.gathering import Gathering
from ztk.zero.parameters.watched import TAKES_GRADIENT
from ztk.zero.shards import ReducedShards

MAX_IN_FLIGHT = 2  # reductions with live buffers: one is sent while the next fills
_DID_NOT_END = (
    "the last backward did not end (it raised): its gradients are half reduced. Call engine.discard_gradients() on every rank before the "
    "next one"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Backward:
    """Settings of a backward.

    reduces: whether its gradients are reduced over the ranks. If False, they are accumulated locally (`no_sync`).
    is_last: whether the optimizer steps after it, without further gradients.
    scope: the buckets that it completes, and reduces if `reduces`. Defaults to all. Gradients of other buckets are accumulated locally.
    scaled: whether its loss has been multiplied by the loss scale.
    """

    reduces: bool = True
    is_last: bool = True
    scope: Collection[Bucket] | None = None
    scaled: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reduction:
    """A running reduction."""

    bucket: Bucket
    work: Pending
    local: Tensor | None  # the local gradient [size] if it returns to the pool
    shard: Tensor  # [shard_size], the sum
    is_last: bool


class GradientReduction:
    """Reduces each bucket once per reducing backward, in one fixed order on all ranks.

    A bucket is reduced when it and all buckets before it in the order are complete. Buckets that are incomplete at the end of the backward,
    because modules were not used, are reduced then, with zeros for missing gradients. So ranks that used different modules issue the same
    collectives. The first backward uses the reverse order of definition, the root last. Later ones use the order in which rank 0's buckets
    became complete: a bucket early in the order that completes late would delay all others.

    pool: holds unreduced gradients at stages 2 and 3.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        *,
        context: ZeroContext,
        gathering: Gathering,
        before_last: Callable[[], None],
    ) -> None:
        """buckets: the trained ones. before_last: called before each reduction of a last backward."""
        self._buckets, self._gathering, self._before_last = buckets, gathering, before_last
        self._policy, self._comm, self._clock = context.policy, context.mesh.comm("data"), context.clock
        self._world = context.mesh.world
        self.pool = BufferPool(device=context.device, ledger=context.ledger, category="gradients in flight")
        self._shards = ReducedShards(pool=self.pool, clock=context.clock)
        root = [bucket for bucket in buckets if bucket.traits.unit == ROOT]
        self._order = [bucket for bucket in reversed(buckets) if bucket not in root] + root
        self._completed: list[Bucket] | None = []  # in order of completion, in the first backward only
        self._announced = Backward()
        self._prescale = 1.0
        self._needs_scaled_loss = False
        self._current: Backward | None = None  # the running backward
        self._task: int | None = None  # autograd's id of it, known from its first gradient
        self._ending: weakref.ref | None = None  # callback at the end of autograd's run; dead if the backward raised
        self._plan: list[Bucket] = []  # the buckets that it completes, in order
        self._num_launched = 0  # of `_plan`
        self._in_flight: deque[_Reduction] = deque()
        self._resident = self._allocate_resident(context.ledger)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), bucket=number, index=index))
            for number, bucket in enumerate(buckets)
            for index, parameter in enumerate(bucket.parameters)
        ]
        for number, bucket in enumerate(buckets):
            if bucket.traits.gradient_dtype is bucket.traits.dtype:
                for index, parameter in enumerate(bucket.parameters):
                    offer_place(
                        parameter, place=functools.partial(_place, weakref.ref(self), bucket=number, index=index)
                    )

    def _allocate_resident(self, ledger: MemoryLedger) -> dict[Bucket, Tensor]:
        """Allocates the gradient buffers that stay, at stages 0 and 1. A collective call, so it cannot wait until gradients arrive."""
        resident = {}
        for bucket in self._buckets:
            if not bucket.traits.shards_gradients:
                buffer = bucket.comm.empty(bucket.size, dtype=bucket.traits.gradient_dtype, label=bucket.traits.name)
                ledger.add(tier=Tier.device, category="gradients", nbytes=buffer.nbytes)
                resident[bucket] = buffer
        return resident

    def detach(self) -> None:
        """Removes the hooks from the parameters. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                withdraw_place(parameter)

    # Backward

    def require_scaled_loss(self) -> None:
        """Makes a backward that was not announced as `scaled` raise RuntimeError, because a loss scale other than 1 is in effect."""
        self._needs_scaled_loss = True

    def set_prescale(self, factor: float) -> None:
        """Sets the factor of a rank's gradients before they are added up, from the next reduction on."""
        self._prescale = factor

    def announce(self, backward: Backward) -> None:
        """Sets the options of the next backward. Its first gradient begins it, unless `begin` is called before.

        A scaled loss stays announced until its backward, because a script may run another forward in between.
        """
        self._announced = replace(backward, scaled=backward.scaled or self._announced.scaled)

    def begin(self, backward: Backward | None = None) -> None:
        """Begins a backward. Defaults to the last one announced.

        Raises RuntimeError if the last backward did not end.
        """
        if self._current is not None:
            raise RuntimeError(_DID_NOT_END)
        backward = backward or self._announced
        scope = backward.scope
        self._plan = self._order if scope is None else [bucket for bucket in self._order if bucket in scope]
        for bucket in self._plan:
            if bucket.gradient.is_final:
                self._reopen(bucket)
        self._current, self._num_launched, self._task, self._ending = backward, 0, None, None
        for bucket in self._plan:
            bucket.gradient.begin_backward()

    def _reopen(self, bucket: Bucket) -> None:
        """Prepares for a further backward of this step, which adds to reduced gradients: a script may call one per loss before one
        `step()`."""
        while any(reduction.bucket is bucket for reduction in self._in_flight):
            self._finish_oldest()
        bucket.gradient.reopen(own=bucket.layout.shard(bucket.comm.rank), prescale=self._prescale)

    def accept(self, bucket: Bucket, *, index: int) -> None:
        """Takes the finished gradient of parameter `index` of `bucket` from autograd, and reduces buckets that are complete.

        Raises RuntimeError if the bucket is reduced already, if the loss lacks the loss scale in effect, and if the last backward did not
        end.
        """
        if (
            gradient_of(bucket.parameters[index]) is None
        ):  # an autograd function returned None; PyTorch calls the hook all the same
            return
        if self._current is None:
            if self._needs_scaled_loss and not self._announced.scaled:
                bucket.parameters[index].grad = None  # autograd stops here, so no other parameter has a gradient
                self._gathering.reshard_all()
                raise RuntimeError(
                    "loss.backward() with a loss scale in effect: the step would divide the gradients by a scale that the loss never had. "
                    "Call engine.backward(loss), or engine.scale(loss).backward()"
                )
            self.begin()
            ending = functools.partial(self.finish)
            torch.autograd.Variable._execution_engine.queue_callback(ending)
            self._ending = weakref.ref(ending)
        elif self._ending is not None and self._ending() is None:
            raise RuntimeError(_DID_NOT_END)
        if bucket.gradient.is_launched:
            raise RuntimeError(
                f"{bucket.layout.placements[index].name}: a second gradient arrived after its bucket was reduced. Re-entrant "
                "activation checkpointing over tied parameters does this; use checkpoint(..., use_reentrant=False)"
            )
        self._task = self._task or torch._C._current_graph_task_id()
        bucket.gradient.accept(index, acquire=functools.partial(self._acquire, bucket))
        if bucket.gradient.is_complete:
            if self._completed is not None:
                self._completed.append(bucket)
            assert self._current is not None
            if self._current.reduces:
                while self._num_launched < len(self._plan) and self._plan[self._num_launched].gradient.is_complete:
                    self._launch_next()
            self._gathering.reshard(bucket)

    def place(self, bucket: Bucket, *, index: int) -> Tensor | None:
        """A view, in the parameter's shape, for an operation of the running backward to write the gradient of parameter `index` to. None if
        the operation must allocate the gradient.

        None is returned if the gradient may be kept elsewhere, by `torch.autograd.grad` inside a backward (which has another id of
        autograd's, known from its first gradient) or by hooks of a script, and if autograd adds to an existing gradient.
        """
        is_ours = self._current is not None and self._task == torch._C._current_graph_task_id()
        if not is_ours or bucket.gradient.is_launched or _is_seen(bucket.parameters[index]):
            return None
        return bucket.gradient.place(index, acquire=functools.partial(self._acquire, bucket))

    def finish(self) -> None:
        """Ends the backward: reduces unused buckets and releases buckets that are still gathered. Idempotent."""
        backward = self._current
        if backward is None:
            return
        if backward.reduces:
            while self._num_launched < len(self._plan):
                self._launch_next()
            for bucket in self._plan:
                bucket.gradient.is_launched, bucket.gradient.is_final = False, not self._policy.shards_gradients
        self._gathering.reshard_all()
        self._end_backward()
        if backward.reduces and self._completed is not None and self._plan[-1:] == self._order[-1:]:
            self._settle_order(self._completed)
            self._completed = None

    def _end_backward(self) -> None:
        """Resets the running backward and its scaled loss."""
        self._current, self._announced = None, replace(self._announced, scaled=False)

    @property
    def has_unreduced(self) -> bool:
        """Whether backwards without reduction have left gradients on this rank."""
        return any(bucket.gradient.has_local and not bucket.gradient.is_final for bucket in self._buckets)

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has left gradients since the last step, reduced or not. The same on every rank unless a backward failed."""
        return (
            self._current is not None
            or bool(self._in_flight)
            or any(b.gradient.has_local or b.gradient.has_earlier or b.gradient.is_reduced for b in self._buckets)
        )

    def unused_names(self) -> frozenset[str]:
        """This rank's trained parameters without a gradient on any rank since the last step. A collective call."""
        used, unused = set(), set()
        for bucket in self._buckets:
            for index, placement in enumerate(bucket.layout.placements):
                (used if index in bucket.gradient.used else unused).add(placement.name)
        asked = set().union(*self._world.gather_objects(unused))
        if not asked:  # the common case
            return frozenset()
        return frozenset(unused.difference(*self._world.gather_objects(used & asked)))

    def reduce_now(self) -> None:
        """Reduces, like a last backward, the gradients of backwards that did not reduce. Every rank must call it."""
        self.announce(Backward())
        self.begin()
        self.finish()

    def reduce_given(self, gradients: Mapping[tuple[Bucket, int], Tensor]) -> None:
        """Reduces, like a last backward, gradients that were computed outside of the engine's backwards. Every rank must call it.

        gradients: by bucket and number of the parameter, each in its parameter's shape, scaled as the engine's are.
        """
        self.begin(Backward())
        for (bucket, index), gradient in gradients.items():
            set_gradient(bucket.parameters[index], gradient.to(bucket.parameters[index].dtype))
            self.accept(bucket, index=index)
        self.finish()

    def rewrite(
        self, bucket: Bucket, *, changes: Mapping[int, Callable[[Tensor], Tensor]], unused: Collection[int] = ()
    ) -> None:
        """Changes gradients of `bucket` in place, at stages 0 and 1, and updates the norm.

        changes: number of a parameter -> function from its gradient to the new one, both in its shape. unused: numbers of parameters that
            count as having no gradient.
        """
        bucket.gradient.used.difference_update(unused)
        for index, change in changes.items():
            if (place := bucket.gradient.read(index)) is not None:
                place.copy_(change(place))
        if changes and bucket.gradient.is_reduced:
            bucket.gradient.record_squares([bucket.own(bucket.gradient.full)])

    def resident_buffers(self) -> list[Tensor]:
        """The full gradients that stay on the device at stages 0 and 1: one flat tensor per bucket."""
        return list(self._resident.values())

    def _settle_order(self, completed: list[Bucket]) -> None:
        """Makes rank 0's order of completion the order of all ranks. Buckets that rank 0 did not use come last."""
        wanted = list(dict.fromkeys([*completed, *self._order]))
        number = {bucket: index for index, bucket in enumerate(self._buckets)}
        order = [number[bucket] for bucket in wanted]
        agreed = self._comm.gather_numbers(order, label="order of reduction")[0]
        self._order = [self._buckets[int(index)] for index in agreed]

    def _acquire(self, bucket: Bucket) -> Tensor:
        """A buffer [size] for the local gradient: resident at stages 0 and 1, from the pool at stages 2 and 3."""
        if bucket.traits.shards_gradients:
            return self.pool.acquire(bucket.size, dtype=bucket.traits.gradient_dtype)
        return self._resident[bucket]

    # Reduction of one bucket

    def _launch_next(self) -> None:
        assert self._current is not None
        bucket, is_last = self._plan[self._num_launched], self._current.is_last
        self._num_launched += 1
        bucket.gradient.is_launched = True
        if is_last:
            self._before_last()
        bucket.gradient.fill_missing(acquire=functools.partial(self._acquire, bucket))
        full, local, label = bucket.gradient.full, None, bucket.traits.name
        assert full is not None, "set by fill_missing"
        if self._prescale != 1.0:
            full.mul_(self._prescale)
        if self._policy.stage == 0:
            shard = bucket.own(full)
            work = bucket.comm.all_reduce(full, label=label)
        elif not bucket.traits.shards_gradients:
            shard = bucket.own(full)
            work = bucket.comm.reduce_scatter(full, out=shard, label=label)
        else:
            while any(
                other.bucket is bucket for other in self._in_flight
            ):  # with few buckets, the last micro-batch's may be in flight
                self._finish_oldest()
            local = bucket.gradient.take()
            assert local is not None
            shard = self._shards.acquire(bucket, dtype=local.dtype)
            work = bucket.exchange.reduce_scatter(local, out=shard, label=label)
        self._in_flight.append(_Reduction(bucket=bucket, work=work, local=local, shard=shard, is_last=is_last))
        while len(self._in_flight) > MAX_IN_FLIGHT:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Waits for the oldest running reduction and passes its sum on."""
        reduction = self._in_flight.popleft()
        with self._clock.phase("communication"):
            reduction.work.wait()
        if reduction.local is not None:
            self.pool.release(reduction.local)
            self._shards.accumulate(reduction.bucket, shard=reduction.shard, is_last=reduction.is_last)
        elif reduction.is_last:
            reduction.bucket.gradient.record_squares([reduction.shard])

    # Step

    def finish_step(self) -> None:
        """Waits for all sums. Raises RuntimeError if no backward was reduced since the last step."""
        self.settle()
        if not all(bucket.gradient.is_reduced for bucket in self._order):
            raise RuntimeError("step() without a synchronised backward since the last step: call backward() first")

    def settle(self) -> None:
        """Waits for all reductions and writes."""
        while self._in_flight:
            self._finish_oldest()
        self._shards.settle()

    def discard(self) -> None:
        """Drops all gradients since the last step, including half reduced ones. Every rank must call it."""
        while self._in_flight:
            reduction = self._in_flight.popleft()
            reduction.work.wait()
            if reduction.local is not None:
                self.pool.release(reduction.local)
                self._shards.release(reduction.bucket, shard=reduction.shard)
        self._shards.settle()
        for bucket in self._buckets:
            if bucket.traits.shards_gradients and (local := bucket.gradient.take()) is not None:
                self.pool.release(local)
            for parameter in bucket.parameters:
                set_gradient(parameter, None)
        self._gathering.reshard_all()
        self._end_backward()
        self.forget()

    def forget(self) -> None:
        """Resets all state after a step."""
        for bucket in self._order:
            bucket.gradient.finish_step()


def _hook(reduction: "weakref.ref[GradientReduction]", *, bucket: int, index: int) -> Callable[[Tensor], None]:
    hook = functools.partial(_on_gradient, reduction=reduction, bucket=bucket, index=index)
    setattr(hook, TAKES_GRADIENT, True)
    return hook


def _place(reduction: "weakref.ref[GradientReduction]", *, bucket: int, index: int) -> Tensor | None:
    """The callable that a parameter offers, see `GradientReduction.place`."""
    alive = reduction()
    return None if alive is None else alive.place(alive._buckets[bucket], index=index)


def _is_seen(parameter: Tensor) -> bool:
    """Whether a script has hooks on `parameter` (any shape) that receive its gradient, or has set its gradient."""
    hooks = parameter._post_accumulate_grad_hooks
    return bool(parameter._backward_hooks) or len(hooks) > 1 or gradient_of(parameter) is not None


def _on_gradient(parameter: Tensor, *, reduction: "weakref.ref[GradientReduction]", bucket: int, index: int) -> None:
    """Hook of a parameter. Autograd's hooks are invisible to Python's garbage collector: a hook that referenced buckets, and through them
    parameters, would keep a model alive after its engine was dropped."""
    alive = reduction()
    if alive is not None:
        alive.accept(alive._buckets[bucket], index=index)
