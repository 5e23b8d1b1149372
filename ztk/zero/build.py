"""From a model to buckets: plan the units, give every bucket its layout, its pieces and its first values.

Nothing here is larger than one piece, or, for a model that already has values, one bucket: a model on the meta device is initialised shard by
shard.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ztk.optim import FlatOptimizer, GroupTable
from ztk.runtime import MemoryLedger, Mesh, Tier
from ztk.runtime.part import InitialValues, Part
from ztk.zero.bucket import Bucket, BucketTraits
from ztk.zero.buffers import BufferPool
from ztk.zero.exchange import exchange_of
from ztk.zero.gathering import Unit
from ztk.zero.layout import BucketLayout, ParameterSpec, Placement
from ztk.zero.partitioned import PartitionedParameter, partitioned_of, placeholder
from ztk.zero.piece import Piece, cut_shard
from ztk.zero.policy import ZeroPolicy
from ztk.zero.units import BucketPlan, UnitPlan, plan_buckets, plan_units
from ztk.zero.update import Stores


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """The buckets in order of definition, and the units that use them, the root last."""

    buckets: list[Bucket]
    units: list[Unit]


@dataclass(frozen=True, kw_only=True, slots=True)
class Builder:
    """What every bucket is built with."""

    policy: ZeroPolicy
    dtype: torch.dtype  # of the parameters
    reduce_dtype: torch.dtype | None  # of the gradients, None: as the parameters
    optimizer: FlatOptimizer
    groups: GroupTable
    stores: Stores
    piece_size: int | None  # elements; None: a shard is one piece
    mesh: Mesh
    parts: Mapping[str, Part]  # of the parameters that are cut or copied along other axes than the data's
    ledger: MemoryLedger
    pool: BufferPool

    def build(self, model: nn.Module, *, initial_values: InitialValues | None) -> Built:
        """Takes over all parameters of `model`; its own storage is released bucket by bucket.

        initial_values: needed if `model` is on the meta device. Otherwise rank 0's values are everybody's.
        Raises ValueError if a parameter has no values.
        """
        self._check(model, initial_values=initial_values)
        plans = plan_units(model)
        whole = self._adopt(model)
        buckets = [bucket for plan in plans for bucket in self._unit_buckets(plan, model=model)]
        owner = {placement.name: bucket for bucket in buckets for placement in bucket.layout.placements}
        for bucket in buckets:
            source = initial_values or self._values_of(bucket, whole=whole)
            self._fill(bucket, source=source)
        return Built(buckets=buckets, units=list(self._units(plans, owner=owner)))

    def _check(self, model: nn.Module, *, initial_values: InitialValues | None) -> None:
        if initial_values is None:
            for name, parameter in model.named_parameters():
                if parameter.is_meta:
                    raise ValueError(
                        f"parameter {name} is on the meta device and has no values: pass initial_values, or build the "
                        "model on a real device"
                    )

    def _adopt(self, model: nn.Module) -> dict[str, Tensor | PartitionedParameter]:
        """Sets the parameters' dtype and device without memory, and returns the values they had, or who has them."""
        values = {}
        for name, parameter in list(model.named_parameters()):
            empty = placeholder(parameter.shape, dtype=self.dtype, device=self.mesh.world.device)
            values[name] = parameter.detach()
            if parameter.is_meta:
                _replace(model, old=parameter, new=nn.Parameter(empty, requires_grad=parameter.requires_grad))
            else:
                partitioned = partitioned_of(parameter)
                values[name] = parameter.data if partitioned is None else partitioned
                if partitioned is not None:
                    partitioned.shard(source=0)
                parameter.data = empty
        return values

    def _unit_buckets(self, plan: UnitPlan, *, model: nn.Module) -> Iterator[Bucket]:
        parameters = dict(model.named_parameters())
        bucket_plans = plan_buckets(
            plan,
            model=model,
            bucket_size=self.policy.bucket_size,
            persistence_threshold=self.policy.param_persistence_threshold,
            parts=self.parts,
        )
        for number, bucket_plan in enumerate(bucket_plans):
            specs = [
                ParameterSpec(name=name, shape=tuple(parameters[name].shape), group=self.groups.row_of.get(name, 0))
                for name in bucket_plan.names
            ]
            comm = self.mesh.comm(bucket_plan.axis)
            layout = BucketLayout.plan(specs, num_shards=comm.size)
            name = plan.name if len(bucket_plans) == 1 else f"{plan.name}#{number}"
            bucket = Bucket(
                self._traits(bucket_plan, name=name),
                layout=layout,
                parameters=[parameters[placement.name] for placement in layout.placements],
                comm=comm,
                exchange=exchange_of(bucket_plan.axis, policy=self.policy, mesh=self.mesh, ledger=self.ledger),
                pool=self.pool,
            )
            bucket.parameter_store = self.stores.parameters
            bucket.pieces = list(self._pieces(bucket))
            yield bucket

    def _traits(self, plan: BucketPlan, *, name: str) -> BucketTraits:
        # A group of one has nothing to shard; stage 3 there only means that parameters may be offloaded.
        alone = self.mesh.comm(plan.axis).size == 1 and self.stores.parameters.tier is Tier.device
        return BucketTraits(
            name=name,
            unit=plan.unit,
            dtype=plan.dtype,
            trainable=plan.trainable,
            shards_parameters=self.policy.shards_parameters and not plan.persistent and not alone,
            shards_gradients=self.policy.shards_gradients,
            counted=plan.counted,
            holders=plan.holders,
        )

    def _pieces(self, bucket: Bucket) -> Iterator[Piece]:
        """The pieces this rank updates: its own shard, or at stage 0 all shards, cut alike."""
        traits, layout = bucket.traits, bucket.layout
        everything = traits.trainable and not self.policy.shards_optimizer
        for rank in range(bucket.comm.size) if everything else (bucket.comm.rank,):
            for number, span in enumerate(cut_shard(layout, rank=rank, piece_size=self.piece_size)):
                name, size = f"{traits.name}/{rank}.{number}", len(span)
                states = gradient = parameter = None
                if traits.trainable:
                    rows = len(self.optimizer.state_names) + (not self._is_own_master(bucket))
                    states = self.stores.optimizer.allocate(
                        name=name, shape=(rows, size), dtype=torch.float32, category="optimizer"
                    )
                    if traits.shards_gradients:
                        gradient = self.stores.gradients.allocate(
                            name=name,
                            shape=(size,),
                            dtype=self.reduce_dtype or traits.dtype,
                            category="gradients",
                            keep=True,
                        )
                if traits.shards_parameters:
                    parameter = self.stores.parameters.allocate(
                        name=name, shape=(size,), dtype=traits.dtype, category="parameters"
                    )
                yield Piece(
                    start=span.start,
                    stop=span.stop,
                    segments=tuple(layout.segments(span)),
                    states=states,
                    gradient=gradient,
                    parameter=parameter,
                )

    def _is_own_master(self, bucket: Bucket) -> bool:
        """An fp32 parameter needs no master copy if the optimizer can reach it where its states are."""
        home = self.stores.parameters.tier if bucket.traits.shards_parameters else Tier.device
        return bucket.traits.dtype is torch.float32 and home is self.stores.optimizer.tier and home is not Tier.nvme

    # First values

    def _values_of(self, bucket: Bucket, *, whole: dict[str, Tensor | PartitionedParameter]) -> InitialValues:
        """The values of a model that has them, the first rank's of each shard group, one bucket at a time."""
        values = {}
        for placement in bucket.layout.placements:
            value = whole.pop(placement.name)
            if isinstance(value, PartitionedParameter):
                values[placement.name] = self._taken(value, bucket=bucket, placement=placement)
                continue
            value = value.to(bucket.comm.device).contiguous()
            bucket.comm.broadcast(value, source=0, label=placement.name).wait()
            values[placement.name] = value.view(-1), 0
        return lambda *, name, start, stop: values[name][0][start - values[name][1] : stop - values[name][1]].float()

    def _taken(self, partitioned: PartitionedParameter, *, bucket: Bucket, placement: Placement) -> tuple[Tensor, int]:
        """What this rank's pieces need of a parameter that was built sharded, and where it starts; the rest is whole for a moment only."""
        first, last = bucket.pieces[0].start - placement.offset, bucket.pieces[-1].stop - placement.offset
        start, stop = (min(max(bound, 0), placement.numel) for bound in (first, last))
        return partitioned.take()[start:stop].clone(), start

    def _fill(self, bucket: Bucket, *, source: InitialValues) -> None:
        if not bucket.traits.shards_parameters:
            bucket.full = self._whole_buffer(bucket).zero_()
            self.ledger.add(tier=Tier.device, category="parameters", nbytes=bucket.full.nbytes)
            bucket.show_parameters()
        for piece in bucket.pieces:
            values = torch.zeros(piece.stop - piece.start, dtype=torch.float32)
            for fragment in bucket.layout.fragments(range(piece.start, piece.stop)):
                place = values[fragment.offset - piece.start :][: fragment.stop - fragment.start]
                place.copy_(source(name=fragment.name, start=fragment.start, stop=fragment.stop))
            self.set_master(bucket, piece=piece, values=values)
        if not bucket.traits.shards_parameters:
            bucket.comm.all_gather(bucket.full, label=bucket.traits.name).wait()

    def _whole_buffer(self, bucket: Bucket) -> Tensor:
        """For parameters that are whole on every rank. Those that are gathered in every step lie where that costs least."""
        if bucket.traits.trainable and self.policy.shards_optimizer:
            return bucket.comm.empty(bucket.size, dtype=bucket.traits.dtype, label=bucket.traits.name)
        return torch.empty(bucket.size, dtype=bucket.traits.dtype, device=bucket.comm.device)

    def set_master(self, bucket: Bucket, *, piece: Piece, values: Tensor) -> None:
        """Sets the master weights of a piece, fp32 [n], and the parameter that follows from them."""
        bucket.exchange.forget()
        parameter = values.to(bucket.traits.dtype)
        if bucket.traits.shards_parameters:
            self.stores.parameters.put(piece.parameter, value=parameter).wait()
        else:
            piece.of(bucket.full).copy_(parameter)
        if piece.states is not None and not self._is_own_master(bucket):
            states = self.stores.optimizer.fetch(piece.states).wait()
            states[0].copy_(values)
            self.stores.optimizer.put(piece.states, value=states).wait()

    def _units(self, plans: list[UnitPlan], *, owner: dict[str, Bucket]) -> Iterator[Unit]:
        for plan in plans:
            used = dict.fromkeys(owner[name] for name in plan.used)
            buckets = tuple(bucket for bucket in used if bucket.traits.shards_parameters)
            if buckets or plan is plans[-1]:
                yield Unit(name=plan.name, module=plan.module, buckets=buckets)


def _replace(model: nn.Module, *, old: nn.Parameter, new: nn.Parameter) -> None:
    """Puts `new` wherever `old` stands, ties included."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new
