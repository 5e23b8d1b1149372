"""Builds buckets from a model: plan the units, lay out every bucket, allocate its slots, set its first values.

Building needs at most one extra piece of memory at a time, or one bucket of a model that already has values. A model on the meta device is
initialised shard by shard.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ztk.core.runtime import Tier
from ztk.core.runtime.part import InitialValues
from ztk.core.runtime.planned import PLANNED, is_planned
from ztk.core.runtime.store import Stores
from ztk.optim import FlatOptimizer
from ztk.zero.buckets.bucket import Bucket
from ztk.zero.buckets.context import ZeroContext
from ztk.zero.buckets.exchange import exchange_of
from ztk.zero.buckets.layout import BucketLayout, ParameterSpec
from ztk.zero.buckets.moments import Moments
from ztk.zero.buckets.piece import Piece, cut_shard
from ztk.zero.buckets.units import (
    BucketKind,
    BucketPlan,
    BucketTraits,
    UnitPlan,
    order_of_use,
    plan_buckets,
    plan_units,
)
from ztk.zero.gathering import Unit
from ztk.zero.parameters.aliases import check_aliases
from ztk.zero.parameters.held import HeldMemory
from ztk.zero.parameters.partitioned import PartitionedParameter, partitioned_of, take
from ztk.zero.parameters.released import placeholder, release
from ztk.zero.parameters.watched import watch
from ztk.zero.update.piece_states import PieceStates
from ztk.zero.update.positions import first_positions

logger = logging.getLogger(__name__)


class Builder:
    """Builds the buckets of one model. buckets: ordered by definition. units: the units that use them, the root last. held: the
    parameters' previous memory, as far as a script still references it."""

    def __init__(self, model: nn.Module, *, context: ZeroContext, initial_values: InitialValues | None) -> None:
        """Takes over all parameters of `model` and frees their memory, bucket by bucket. A collective call.

        initial_values: required if `model` is on the meta device. Otherwise rank 0's values are used on all ranks.
        Raises ValueError if a parameter has no values, shares memory with another tensor of the model, or has a dtype that the training
        dtype cannot represent.
        """
        self._context, self._policy, self._stores = context, context.policy, context.stores
        self._states = PieceStates(context)
        rows = context.groups.rows
        self._matrix_groups = frozenset(number for number, row in enumerate(rows) if row.muon_scale)
        if initial_values is None:
            _check_has_values(model)
        check_aliases(model)
        _check_dtypes(model, dtype=context.precision.dtype, warns=context.mesh.world.rank == 0)
        plans = plan_units(model)
        self._positions = _positions(plans, model=model, context=context)
        self.held = HeldMemory(model)
        values = self._take_values(model)
        parameters = dict(model.named_parameters())
        planned = [
            bucket for plan in plans for bucket in self._planned_buckets(plan, model=model, parameters=parameters)
        ]
        resident = self._resident(planned)
        self.buckets = [
            self._bucket(own, parameters=parameters, stores=context.resident if own in resident else context.stores)
            for own in planned
        ]
        for bucket in self.buckets:
            self._fill(bucket, source=initial_values or self._share_values(bucket, values=values))
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                take(parameter)
                watch(parameter)
        self.held.start(warns=context.mesh.world.rank == 0)
        owner = {placement.name: bucket for bucket in self.buckets for placement in bucket.layout.placements}
        self.units = list(_units(plans, owner=owner))

    def _take_values(self, model: nn.Module) -> dict[str, Tensor | PartitionedParameter]:
        """Sets the parameters' dtype and device without memory, and returns their previous values, or the objects that hold them."""
        values = {}
        for name, parameter in list(model.named_parameters()):
            empty = placeholder(parameter.shape, dtype=self._context.precision.dtype, device=self._context.device)
            if parameter.is_meta:
                new = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                release(new, value=empty)
                _replace(model, old=parameter, new=new)
                continue
            partitioned = partitioned_of(parameter)
            values[name] = parameter.data if partitioned is None else partitioned
            if partitioned is not None:
                partitioned.shard(source=0)
            release(parameter, value=empty)
        return values

    # Buckets without values

    def _planned_buckets(
        self, unit: UnitPlan, *, model: nn.Module, parameters: Mapping[str, nn.Parameter]
    ) -> Iterator["_PlannedBucket"]:
        row_of = self._context.groups.row_of
        plans = plan_buckets(
            unit,
            model=model,
            bucket_size=self._policy.bucket_size,
            persistence_threshold=self._policy.param_persistence_threshold,
            parts=self._context.parts,
            float8=self._context.float8 if self._policy.shards_parameters else (),
        )
        for number, plan in enumerate(plans):
            comm = self._context.mesh.comm(plan.kind.axis)
            specs = [
                ParameterSpec(name=name, shape=tuple(parameters[name].shape), group=row_of.get(name, 0))
                for name in plan.names
            ]
            layout = BucketLayout.plan(specs, num_shards=comm.size)
            traits = self._traits(plan, name=unit.name if len(plans) == 1 else f"{unit.name}#{number}")
            yield _PlannedBucket(traits=traits, layout=layout, kind=plan.kind)

    def _resident(self, planned: list["_PlannedBucket"]) -> set["_PlannedBucket"]:
        """The buckets whose optimizer states stay on the device, at most `1 - optimizer_fraction` of this rank's states.

        They are the first ones in the order of use, because the next forward waits for their update first.
        """
        trained = [own for own in planned if own.traits.trainable]
        room = (1 - self._context.optimizer_fraction) * sum(self._num_states(own) for own in trained)
        resident = set()
        for own in sorted(trained, key=lambda own: order_of_use(own.traits)):
            if self._num_states(own) <= room:
                room -= self._num_states(own)
                resident.add(own)
        return resident

    def _num_states(self, planned: "_PlannedBucket") -> int:
        """Elements of a bucket whose states this rank stores."""
        return planned.layout.shard_size if self._policy.shards_optimizer else planned.layout.size

    def _bucket(self, planned: "_PlannedBucket", *, parameters: Mapping[str, nn.Parameter], stores: Stores) -> Bucket:
        traits, layout, kind = planned.traits, planned.layout, planned.kind
        comm = self._context.mesh.comm(kind.axis)
        return Bucket(
            traits,
            layout=layout,
            parameters=[parameters[placement.name] for placement in layout.placements],
            pieces=list(self._pieces(traits, layout=layout, own_rank=comm.rank, stores=stores)),
            comm=comm,
            exchange=exchange_of(
                kind.axis,
                is_trained=kind.trainable,
                is_float8=kind.is_float8,
                layout=layout,
                context=self._context,
            ),
            context=self._context,
        )

    def _traits(self, plan: BucketPlan, *, name: str) -> BucketTraits:
        # A group of one rank has nothing to shard; at stage 3 its parameters may still be offloaded.
        is_alone = self._context.mesh.comm(plan.kind.axis).size == 1 and self._stores.parameters.tier is Tier.device
        return BucketTraits(
            name=name,
            unit=plan.unit,
            dtype=plan.kind.dtype,
            gradient_dtype=self._context.precision.reduce_dtype or plan.kind.dtype,
            trainable=plan.kind.trainable,
            shards_parameters=self._policy.shards_parameters and not plan.kind.persistent and not is_alone,
            shards_gradients=self._policy.shards_gradients,
            counted=plan.kind.counted,
            holders=plan.kind.holders,
        )

    def _pieces(self, traits: BucketTraits, *, layout: BucketLayout, own_rank: int, stores: Stores) -> Iterator[Piece]:
        """The pieces that this rank updates. They cover its shard, or all shards at stage 0, cut in the same way."""
        updates_all = traits.trainable and not self._policy.shards_optimizer
        size = self._context.piece_size if stores.updates_on_host else None
        for rank in range(layout.num_shards) if updates_all else (own_rank,):
            for number, span in enumerate(cut_shard(layout, rank=rank, piece_size=size)):
                name = f"{traits.name}/{rank}.{number}"
                yield self._piece(traits, layout=layout, span=span, name=name, stores=stores)

    def _piece(self, traits: BucketTraits, *, layout: BucketLayout, span: range, name: str, stores: Stores) -> Piece:
        """A piece with its slots. A new slot reads as zeros."""
        shape = (len(span),)
        states = gradient = parameter = None
        has_master = traits.trainable and not self._is_own_master(traits, stores=stores)
        # One launch of the update per segment: as few as possible with one group, and one distance to the elements' positions if those
        # count.
        segments = tuple(layout.segments(span, positions=self._positions if traits.trainable else None))
        moments = momentum = None
        if traits.trainable:
            moments = Moments.of(segments, start=span.start, matrix_groups=self._matrix_groups)
            with_rows = None if moments is None else moments.num_moments
            stored, dtype = self._context.states.stored(len(span), has_master=has_master, with_rows=with_rows)
            states = stores.optimizer.allocate(name=name, shape=stored, dtype=dtype, category="optimizer")
        if moments is not None:
            momentum = stores.optimizer.allocate(
                name=f"{name} momentum", shape=(moments.num_momentum,), dtype=torch.float32, category="optimizer"
            )
        average = None
        if traits.trainable and stores.average is not None:
            average = stores.average.allocate(
                name=f"{name} average", shape=shape, dtype=torch.float32, category="average"
            )
        if traits.trainable and traits.shards_gradients:
            gradient = stores.gradients.allocate(
                name=name, shape=shape, dtype=traits.gradient_dtype, category="gradients", keep=True
            )
        if traits.shards_parameters:
            parameter = stores.parameters.allocate(name=name, shape=shape, dtype=traits.dtype, category="parameters")
        return Piece(
            start=span.start,
            stop=span.stop,
            stores=stores,
            segments=segments,
            fragments=tuple(layout.fragments(span)),
            states=states,
            gradient=gradient,
            parameter=parameter,
            has_master=has_master,
            average=average,
            moments=moments,
            momentum=momentum,
        )

    def _is_own_master(self, traits: BucketTraits, *, stores: Stores) -> bool:
        """Whether the parameter is its own master weight: it has the master weights' dtype, and the optimizer can write it where its states
        are. On NVMe a bf16 parameter is read and written in addition to the states, which moves as many bytes as a copy would."""
        tier, master = (
            stores.parameters.tier if traits.shards_parameters else Tier.device,
            self._context.states.master,
        )
        is_reached = tier is stores.optimizer.tier and (tier is not Tier.nvme or master is torch.bfloat16)
        return traits.dtype is master and is_reached

    # First values

    def _share_values(self, bucket: Bucket, *, values: dict[str, Tensor | PartitionedParameter]) -> InitialValues:
        """Removes the bucket's values, from the first rank of its shard group, from `values`. A collective call."""
        shared = {}  # name -> (flat values, the element that they start at)
        for placement in bucket.layout.placements:
            value = values.pop(placement.name)
            if isinstance(value, PartitionedParameter):  # full only briefly: this rank's pieces need a range of it
                bounds = bucket.pieces[0].start - placement.offset, bucket.pieces[-1].stop - placement.offset
                start, stop = (min(max(bound, 0), placement.numel) for bound in bounds)
                shared[placement.name] = value.take()[start:stop].clone(), start
            else:
                value = value.to(bucket.comm.device).contiguous()
                bucket.comm.broadcast(value, source=0, label=placement.name).wait()
                shared[placement.name] = value.view(-1), 0

        def read(*, name: str, start: int, stop: int) -> Tensor:
            flat, first = shared[name]
            return flat[start - first : stop - first].float()

        return read

    def _fill(self, bucket: Bucket, *, source: InitialValues) -> None:
        """Sets the bucket's first values. A collective call for buckets that are never sharded."""
        if not bucket.traits.shards_parameters:
            full = self._allocate_full(bucket).zero_()
            self._context.ledger.add(tier=Tier.device, category="parameters", nbytes=full.nbytes)
            bucket.residency.keep_full(full)
        planned = is_planned(self._context.device)
        for piece in bucket.pieces:
            values = torch.zeros(piece.numel, dtype=torch.float32, device=PLANNED if planned else None)
            for fragment in piece.fragments if not planned else ():  # a plan has no values
                values[fragment.place] = source(name=fragment.name, start=fragment.start, stop=fragment.stop)
            self._states.set_master(bucket, piece=piece, values=values)
            self._states.start_average(piece, values=values)
        bucket.share_parameters()

    def _allocate_full(self, bucket: Bucket) -> Tensor:
        """A buffer for parameters that are full on every rank; in shared memory if they are gathered in every step."""
        if bucket.traits.trainable and self._policy.shards_optimizer:
            return bucket.comm.empty(bucket.size, dtype=bucket.traits.dtype, label=bucket.traits.name)
        return torch.empty(bucket.size, dtype=bucket.traits.dtype, device=bucket.comm.device)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _PlannedBucket:
    """A bucket before it has memory."""

    traits: BucketTraits
    layout: BucketLayout
    kind: BucketKind


def _positions(plans: list[UnitPlan], *, model: nn.Module, context: ZeroContext) -> dict[str, int] | None:
    """Positions of the trained parameters, or None if no state is rounded stochastically."""
    if not isinstance(context.optimizer, FlatOptimizer) or not context.optimizer.is_stochastic:
        return None
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return first_positions(plans, shapes=shapes, row_of=context.groups.row_of, parts=context.parts)


def _check_dtypes(model: nn.Module, *, dtype: torch.dtype, warns: bool) -> None:
    """Checks that parameters can be cast to the training `dtype` with no change beyond rounding. warns: about wider ones, on one rank."""
    narrow = []
    for name, parameter in model.named_parameters():
        own = str(parameter.dtype).removeprefix("torch.")
        if parameter.is_complex():
            raise ValueError(
                f"parameter {name}: is {own}, and training would drop its imaginary part: store torch.view_as_real(x) and compute with "
                "torch.view_as_complex in the forward"
            )
        if not parameter.is_floating_point():
            raise ValueError(
                f"parameter {name}: is {own}, and training would make it a float: store it with register_buffer, which keeps its dtype"
            )
        if parameter.dtype in (torch.bfloat16, torch.float16):
            narrow.append(name)
        if parameter.dtype == torch.float64:  # accepted as in DeepSpeed, whose scripts use parameters made by numpy
            logger.warning(
                "parameter %s: is float64 and becomes float32 at most; call model.float() before to silence this", name
            )
    if narrow and dtype is torch.float32 and warns:
        logger.warning(
            "%d parameters are 16 bit (%s), but no 16-bit training is configured: they become float32, with twice the memory and other numbers "
            'than in 16 bit. Add "bf16": {"enabled": true} (or fp16; precision= of parallelize), or call model.float() before',
            len(narrow),
            ", ".join(narrow[:3]) + " ..." * (len(narrow) > 3),
        )


def _check_has_values(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"parameter {name} is on the meta device and has no values: pass initial_values, or build the "
                "model on a real device"
            )


def _units(plans: list[UnitPlan], *, owner: dict[str, Bucket]) -> Iterator[Unit]:
    for plan in plans:
        used = dict.fromkeys(owner[name] for name in plan.used)
        buckets = tuple(bucket for bucket in used if bucket.traits.shards_parameters)
        if buckets or plan is plans[-1]:
            yield Unit(name=plan.name, module=plan.module, buckets=buckets)


def _replace(model: nn.Module, *, old: nn.Parameter, new: nn.Parameter) -> None:
    """Replaces `old` by `new` wherever the model holds it, ties included."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new
