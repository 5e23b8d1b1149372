"""ZeRO over one model: built once, then gathering, reduction and update in turn."""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ztk.core.policies.ema import EmaPolicy
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import PrecisionPolicy
from ztk.core.runtime import MemoryLedger, Mesh, PhaseClock
from ztk.core.runtime.buffers import BufferPool
from ztk.core.runtime.part import InitialValues, Part
from ztk.core.runtime.store import Stores
from ztk.optim import FlatOptimizer, GroupTable, TorchStep, WholeStep
from ztk.zero.buckets.bucket import Bucket
from ztk.zero.buckets.context import ZeroContext
from ztk.zero.buckets.residency import ParameterState
from ztk.zero.buckets.units import order_of_use
from ztk.zero.build import Builder
from ztk.zero.gathering import Gathering
from ztk.zero.hooks import ModelHooks, act_on_access, forget_access
from ztk.zero.parameters.awaited import wait_for
from ztk.zero.parameters.partitioned import PartitionedParameter, ZeroInitContext, give_back
from ztk.zero.parameters.released import check_saved
from ztk.zero.reduction import GradientReduction
from ztk.zero.state.named import NamedState
from ztk.zero.state.offload import StateOffloader
from ztk.zero.state.shards import ModelState
from ztk.zero.update.missed import MissedUpdates
from ztk.zero.update.piece_states import PieceStates
from ztk.zero.update.update import ShardUpdate
from ztk.zero.writes import ParameterWrites


class AveragedWeights:
    """Exchanges weights and average, shard by shard. is_shown: whether the parameters are the average now."""

    def __init__(
        self, buckets: list[Bucket], *, context: ZeroContext, update: ShardUpdate, gathering: Gathering
    ) -> None:
        """buckets: the trained ones."""
        self._buckets, self._states, self._has_average = buckets, PieceStates(context), context.ema is not None
        self._update, self._gathering = update, gathering
        self.is_shown = False

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Context in which the parameters are the average, cast to the model's dtype. Afterwards they and the master weights have their
        previous bits.

        A collective call, between steps. Raises RuntimeError if there is no average, it is shown already, or parameters are pinned.
        """
        if not self._has_average:
            raise RuntimeError("no average of the weights is kept: pass ema=EmaPolicy(decay=0.999) to parallelize")
        if self.is_shown:
            raise RuntimeError("the average is in the place of the weights already: leave engine.averaged() first")
        self._exchange()
        self.is_shown = True
        try:
            yield
        finally:
            self._exchange()
            self.is_shown = False

    def check_hidden(self, action: str) -> None:
        """Raises RuntimeError if the average is shown. action: the refused operation, for the message."""
        if self.is_shown:
            raise RuntimeError(
                f"{action} inside engine.averaged() would take the average for the weights: leave it first"
            )

    def _exchange(self) -> None:
        self._gathering.reshard_before_change()
        self._update.finish()  # takes over writes of a script, which the exchange would hide
        self._gathering.parameters_change()
        for bucket in self._buckets:
            for piece in bucket.pieces:
                self._states.exchange_average(bucket, piece=piece)
        for bucket in self._buckets:
            bucket.share_parameters()


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


_NOT_SEEN = (
    "zero.overlap_gather=true: {reader} would read parameters before they are gathered, because ztk cannot intercept these reads; set "
    "zero.overlap_gather=false"
)


class Zero:
    """The parameters, gradients and optimizer states of one model, sharded according to `policy`.

    buckets: ordered by definition. gathering, hooks: parameters at stage 3. reduction: gradients.
    state: the state for checkpoints. named_state: the state of single parameters. offloader: moves states off the device.
    averaged: shows the average of the weights. state_names: names of the states stored per parameter, without its master weight.
    kept_states: their formats, see `StateFormat.described`. matrices: names of the parameters that Muon updates.
    num_parameters: elements of the model over all ranks, including frozen ones, without padding.
    dtype: dtype of the parameters as the model computes with them. gradient_dtype: dtype in which gradients are sent and added up.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        policy: ZeroPolicy,
        precision: PrecisionPolicy,
        optimizer: FlatOptimizer | TorchStep | WholeStep,
        groups: GroupTable,
        stores: Stores,
        mesh: Mesh,
        ledger: MemoryLedger,
        clock: PhaseClock,
        piece_size: int | None = None,
        optimizer_fraction: float = 1.0,
        parts: Mapping[str, Part] | None = None,
        initial_values: InitialValues | None = None,
        skip_unused: bool = False,
        ema: EmaPolicy | None = None,
        float8: frozenset[str] = frozenset(),
    ) -> None:
        """Takes over all parameters of `model`. A collective call.

        piece_size: elements that are updated at once. Defaults to a shard. optimizer_fraction: the fraction of the states in
        `stores.optimizer`; the rest stays on the device. parts: the parameters that are sharded or replicated along axes other than data
        parallelism. initial_values: required if `model` is on the meta device. skip_unused: a step leaves parameters without a gradient
        unchanged.
        ema: keeps a moving average of the trained weights with the optimizer's states, or in `stores.average`. If omitted, no average is
        kept. float8: names of parameters that only float8 products read.
        Raises ValueError if a parameter has no values.
        """
        self.policy, self.optimizer, self.parts = policy, optimizer, parts or {}
        self.matrices = frozenset(name for name, row in groups.row_of.items() if groups.rows[row].muon_scale)
        self._skip_unused, self._ema = skip_unused, ema
        self.dtype, self.gradient_dtype = precision.dtype, precision.reduce_dtype or precision.dtype
        self._stores, self._comm, self._pipeline_rank = stores, mesh.world, mesh.comm("pp").rank
        context = ZeroContext(
            policy=policy,
            precision=precision,
            optimizer=optimizer,
            groups=groups,
            stores=stores,
            mesh=mesh,
            parts=self.parts,
            piece_size=piece_size,
            ledger=ledger,
            clock=clock,
            gathered=BufferPool(device=mesh.world.device, ledger=ledger, category="gathered"),
            ema=ema,
            float8=float8,
            optimizer_fraction=optimizer_fraction,
        )
        self.state_names, self.kept_states = context.state_names, context.described_states
        built = Builder(model, context=context, initial_values=initial_values)
        self.buckets = built.buckets
        self._trained = [bucket for bucket in built.buckets if bucket.traits.trainable]
        self._is_sharded = any(bucket.traits.shards_parameters for bucket in built.buckets)
        self.gathering = Gathering(built.units if self._is_sharded else [], context=context)
        self.hooks = ModelHooks(self.gathering)
        in_order_of_use = sorted(self._trained, key=lambda bucket: order_of_use(bucket.traits))
        self._update = ShardUpdate(in_order_of_use, context=context)
        self.reduction = GradientReduction(
            self._trained, context=context, gathering=self.gathering, before_last=self._update.fetch_ahead
        )
        self._writes = ParameterWrites(
            built.buckets, model=model, context=context, finish_update=self._update.finish_running
        )
        self._update.take_over = weakref.WeakMethod(self._writes.take_over)
        self.gathering.mark_updated = weakref.WeakMethod(self._writes.mark_updated)
        self._held, self._is_evaluating = built.held, False
        self._model = model
        if policy.overlap_gather:
            _check_seen(model)
            watched = {parameter for bucket in self._trained for parameter in bucket.parameters}
            act_on_access(model.modules(), parameters=watched, on_access=wait_for)
        self._copies = SharedGradients(self._trained, context=context)
        self._piece_states = PieceStates(context)
        self.state = ModelState(built.buckets, context=context, update=self._update, gathering=self.gathering)
        self.named_state = NamedState(context, update=self._update, reduction=self.reduction, gathering=self.gathering)
        self.offloader = StateOffloader(
            built.buckets,
            context=context,
            gathering=self.gathering,
            reduction=self.reduction,
            update=self._update,
        )
        self.averaged = AveragedWeights(self._trained, context=context, update=self._update, gathering=self.gathering)
        self.num_parameters = self._count_parameters()

    @property
    def tiers(self) -> dict[str, str]:
        """The tiers of optimizer states and parameters."""
        return {"optimizer": str(self._stores.optimizer.tier), "parameters": str(self._stores.parameters.tier)}

    def _count_parameters(self) -> int:
        """Counts elements over all ranks, each part once."""
        first = [bucket for bucket in self.buckets if bucket.traits.counted and bucket.comm.rank == 0]
        count = sum(bucket.layout.num_parameters for bucket in first)
        counts = self._comm.gather_numbers([count], label="number of parameters", dtype=torch.float64)
        return int(sum(of_rank[0] for of_rank in counts))  # exact up to 2^53

    # Step

    def sum_of_squares(self) -> Tensor:
        """float64 [1]: the squared norm of all ranks' gradients, still scaled and summed; the same bits at every stage and on every rank.

        Raises RuntimeError if no backward was reduced since the last step, and on every rank if the ranks wrote different values into a
        parameter. A collective call.
        """
        agreement, error = self._writes.agreement, None
        try:
            self._writes.take_over()
            self._writes.check_structure()
            self._held.check()
        except (RuntimeError, ValueError) as found:
            if not agreement.tells_errors:
                raise
            error = found
        self.reduction.finish_step()
        self._copies.add_up()
        counted = [bucket.gradient.squares for bucket in self._trained if bucket.traits.counted]
        partial = torch.cat(counted or [torch.zeros(1, dtype=torch.float64, device=self._comm.device)]).sum().view(1)
        everyones = self._comm.gather_scalars(agreement.signed(partial, error=error), label="gradient norm")
        agreement.check(everyones)
        return everyones.abs().sum().view(1)

    def update(self, control: Tensor, *, step: int, evaluate: Callable[[], Any] | None = None) -> None:
        """The optimizer step, after `step_control` has written `control`, fp32 [groups, 16]. A collective call.

        step: its number, from 1 on, including skipped ones, which determines when the average of the weights is due. evaluate: for an
        optimizer with a closure; returns a loss after it has computed reduced gradients again and rewritten `control`.
        Raises RuntimeError if parameters are pinned, show the average, or were saved without their values.
        """
        self.averaged.check_hidden("a step")
        check_saved()
        self.gathering.reshard_before_change()  # a forward without a backward may have left old parameters gathered
        skipped = self._writes.frozen_names()
        if self._skip_unused:
            skipped |= self.reduction.unused_names()
        averages = self._ema is not None and step % self._ema.every == 0
        self._update.run(control, skipped=skipped, averages=averages, evaluate=evaluate, after_write=self._after_write)
        self._after_write()

    def _after_write(self) -> None:
        self.gathering.parameters_change()
        self.reduction.forget()

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """Context with the weights that an optimizer of full parameters has for evaluation, if it has `train()` and `eval()`. A collective
        call, between steps."""
        if not isinstance(self.optimizer, WholeStep) or not self.optimizer.has_modes or self._is_evaluating:
            yield
            return
        self._set_mode("eval")
        self._is_evaluating = True
        try:
            yield
        finally:
            self._is_evaluating = False
            self._set_mode("train")

    def _set_mode(self, name: str) -> None:
        assert self._update.whole is not None
        self._update.finish()
        self.gathering.reshard_before_change()
        self._update.whole.set_mode(name)
        self.gathering.parameters_change()

    @property
    def whole_device(self) -> torch.device:
        """Where an optimizer of full parameters keeps its states."""
        assert self._update.whole is not None
        return self._update.whole.device

    @contextmanager
    def whole_states(self) -> Iterator[WholeStep]:
        """The optimizer of full parameters, with its states in memory."""
        assert self._update.whole is not None and isinstance(self.optimizer, WholeStep)
        self._update.whole.fetch()
        try:
            yield self.optimizer
        finally:
            self._update.whole.spill()

    @property
    def missed_updates(self) -> MissedUpdates:
        """The updates of the run that each parameter of this rank has missed, for optimizers that count them."""
        return self._update.missed

    def finish_update(self) -> None:
        """Waits for the last update. Raises its error."""
        self._update.finish()

    def discard_gradients(self) -> None:
        """Drops the gradients since the last step. Every rank must call it."""
        self._update.finish_running()  # its thread fetches states, too
        self.reduction.discard()

    def has_overflow(self) -> bool:
        """Whether a reduced gradient is not finite, on any rank. A collective call; waits for the device.

        Raises RuntimeError unless a step is due.
        """
        self.reduction.settle()
        own = [bucket.gradient.squares for bucket in self._trained if bucket.gradient.is_reduced]
        if not own:
            raise RuntimeError("no reduced gradient now: call this between the backward at a boundary and step()")
        found = self._comm.gather_scalars(torch.cat(own).sum().view(1), label="overflow")
        return not bool(found.isfinite().all())

    def first_non_finite(self) -> str | None:
        """The first parameter, in order of definition and of pipeline ranks, whose reduced gradient is not finite.

        The same result on every rank, or None if all are finite. A collective call.
        """
        first, names = float("inf"), []
        for bucket in self._trained:
            numbers = {placement.name: len(names) + index for index, placement in enumerate(bucket.layout.placements)}
            for piece in bucket.own_pieces:
                with self._piece_states.gradient(bucket, piece=piece) as gradient:
                    for fragment in piece.fragments:
                        if not gradient[fragment.place].isfinite().all():
                            first = min(first, numbers[fragment.name])
            names += numbers
        name = None if first == float("inf") else names[int(first)]
        everyone = self._comm.gather_objects((name is None, self._pipeline_rank, first, name))  # `first`: of own names
        return min(everyone, key=lambda found: found[:3])[3]

    # Parameters

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context in which all parameters are full: for reading, and for small models. Every rank must enter."""
        sharded = [bucket for bucket in self.buckets if bucket.state is ParameterState.sharded]
        for bucket in sharded:
            self.gathering.unshard_untraced(bucket)
        try:
            yield
        finally:
            for bucket in sharded:
                self.gathering.reshard(bucket)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, parameter in its full shape), with at most one bucket full at a time: at stage 3 a parameter is valid until the next one.

        Every rank must iterate to the end.
        """
        self._writes.take_over()
        for bucket in self.buckets:
            was_sharded = bucket.state is ParameterState.sharded
            if was_sharded:
                self.gathering.unshard_untraced(bucket)
            for placement, parameter in zip(bucket.layout.placements, bucket.parameters, strict=True):
                yield placement.name, parameter.data
            if was_sharded:
                self.gathering.reshard(bucket, may_be_viewed=False)

    def is_changed(self, bucket: Bucket, *, name: str) -> bool:
        """Whether a gathered parameter of `bucket` was written: its bits in this rank's slice differ from the stored shard's."""
        placement = bucket.layout.placement(name)
        return bucket.residency.is_changed(range(placement.offset, placement.stop))

    def compile(self, model: nn.Module, **options: object) -> None:
        """Runs torch.compile with `options` on the model, or on every unit inside its gathering if parameters are sharded.

        Raises ValueError with `overlap_gather`.
        """
        if self.policy.overlap_gather:
            raise ValueError(_NOT_SEEN.format(reader="compiled code"))
        if self._is_sharded:
            self.hooks.compile(functools.partial(torch.compile, **options))
        else:
            # pyrefly: ignore[no-matching-overload]  # keywords of torch.compile as the user gave them
            model.forward = torch.compile(model.forward, **options)

    # End

    def release_model(self, init_context: ZeroInitContext) -> None:
        """Undoes the building with one full bucket at a time, and closes. Another Zero may then take over the model. Every rank must call
        it.

        Sharded parameters become slices in `init_context`, the others stay full; optimizer states are lost.
        Raises RuntimeError if parameters are pinned.
        """
        self.gathering.reshard_before_change()
        for bucket in self.buckets:
            if bucket.traits.shards_parameters:
                self.gathering.unshard_untraced(bucket)
                for parameter in bucket.parameters:
                    PartitionedParameter(parameter, init_context=init_context)
                self.gathering.reshard(bucket)
        self.hooks.detach()
        self.close()

    def close(self) -> None:
        """Ends the last update and closes all stores, and raises their errors. At stage 3 the model is unusable afterwards."""
        self.reduction.detach()
        if self.policy.overlap_gather:
            forget_access(self._model.modules())
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                give_back(parameter)
        with ExitStack() as stack:  # everything is closed, even if one call raises
            stack.callback(self._stores.close)
            stack.callback(self._update.close)
            for bucket in self.buckets:
                stack.callback(bucket.residency.wait_for_values)


def _check_seen(model: nn.Module) -> None:
    """Raises ValueError if modules read parameters without a way to intercept it."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(_NOT_SEEN.format(reader=f"the scripted module {name or 'itself'}"))
