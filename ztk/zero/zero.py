"""ZeRO over one model: built once, then gathering, reduction and update take turns."""

import functools
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ztk.optim import FlatOptimizer, GroupTable
from ztk.precision import PrecisionPolicy
from ztk.runtime import MemoryLedger, Mesh, PhaseClock, Tier
from ztk.runtime.part import InitialValues, Part
from ztk.zero.bucket import Bucket, ParameterState
from ztk.zero.buffers import BufferPool
from ztk.zero.build import Builder
from ztk.zero.copies import SharedGradients
from ztk.zero.gathering import Gathering
from ztk.zero.partitioned import PartitionedParameter, ZeroInitContext
from ztk.zero.piece import Piece
from ztk.zero.policy import ZeroPolicy
from ztk.zero.reduction import GradientReduction
from ztk.zero.units import ROOT
from ztk.zero.update import ShardUpdate, Stores


@dataclass(frozen=True, kw_only=True, slots=True)
class StateShard:
    """This rank's stretch [start, stop) of one parameter's flat state: what a checkpoint is made of.

    kind: "master" (fp32 weights; the parameter is their cast), a name of the optimizer's states, or "parameter" for a frozen
    parameter, which has nothing else. start and stop count the elements of what this rank holds of the parameter: of its `part`.
    """

    name: str
    kind: str
    part: Part
    start: int
    stop: int
    value: Tensor  # [stop - start]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSlice:
    """A `StateShard` without its values: known without touching the stores."""

    name: str
    kind: str
    part: Part
    dtype: torch.dtype
    start: int
    stop: int


class Zero:
    """The parameters, gradients and optimizer states of `model`, sharded as `policy` says."""

    def __init__(
        self,
        model: nn.Module,
        *,
        policy: ZeroPolicy,
        precision: PrecisionPolicy,
        optimizer: FlatOptimizer,
        groups: GroupTable,
        stores: Stores,
        mesh: Mesh,
        ledger: MemoryLedger,
        clock: PhaseClock,
        piece_size: int | None = None,
        parts: Mapping[str, Part] | None = None,
        initial_values: InitialValues | None = None,
    ) -> None:
        self.policy, self.optimizer, self._stores, self._comm = policy, optimizer, stores, mesh.world
        self._stage = mesh.comm("pp").rank
        self.parts = parts or {}
        gathered = BufferPool(device=mesh.world.device, ledger=ledger, category="gathered")
        passing = BufferPool(device=mesh.world.device, ledger=ledger, category="gradients in flight")
        on_cpu = mesh.world.device.type == "cpu"
        updated = BufferPool(
            device=torch.device("cpu"),
            ledger=ledger,
            category="parameters on their way",
            tier=Tier.device if on_cpu else Tier.host,
        )
        self._pools = gathered, passing, updated
        self._builder = Builder(
            policy=policy,
            dtype=precision.dtype,
            reduce_dtype=precision.reduce_dtype,
            optimizer=optimizer,
            groups=groups,
            stores=stores,
            piece_size=piece_size,
            mesh=mesh,
            parts=self.parts,
            ledger=ledger,
            pool=gathered,
        )
        built = self._builder.build(model, initial_values=initial_values)
        self.buckets = built.buckets
        trained = [bucket for bucket in built.buckets if bucket.traits.trainable]
        sharded = any(bucket.traits.shards_parameters for bucket in built.buckets)
        self.gathering = Gathering(built.units if sharded else [], policy=policy, clock=clock)
        self.reduction = GradientReduction(
            trained,
            policy=policy,
            store=stores.gradients,
            gathering=self.gathering,
            comm=mesh.comm("data"),
            dtype=precision.reduce_dtype,
            pool=passing,
            ledger=ledger,
            clock=clock,
        )
        self._copies = SharedGradients(trained, reduction=self.reduction, store=stores.gradients, comm=mesh.comm("pp"))
        in_order_of_use = sorted(
            trained, key=lambda bucket: bucket.traits.unit != ROOT
        )  # the next forward starts there
        self._update = ShardUpdate(
            in_order_of_use,
            optimizer=optimizer,
            stores=stores,
            passing=updated,
            clock=clock,
        )
        self.reduction.on_boundary_launch = self._update.fetch_ahead
        self._trained = trained
        self.num_parameters = self._count_parameters()  # of the whole model, frozen ones included, padding not

    @property
    def tiers(self) -> dict[str, str]:
        """Where optimizer states and parameters sleep."""
        return {"optimizer": str(self._stores.optimizer.tier), "parameters": str(self._stores.parameters.tier)}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters as the model computes with them."""
        return self._builder.dtype

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype in which gradients travel and add up."""
        return self._builder.reduce_dtype or self._builder.dtype

    def _count_parameters(self) -> int:
        """Over all ranks, each part once."""
        first = [bucket for bucket in self.buckets if bucket.traits.counted and bucket.comm.rank == 0]
        count = sum(bucket.layout.num_parameters for bucket in first)
        counts = torch.tensor([count], dtype=torch.float64, device=self._comm.device)  # exact up to 2^53
        return int(self._comm.gather_scalars(counts, label="number of parameters").sum())

    def sum_of_squares(self) -> Tensor:
        """fp32 [1]: over all ranks' gradients, scaled and summed as they are, the same bits at every stage and on every rank."""
        self.reduction.finish_step()
        self._copies.add_up()
        counted = [self.reduction.squares[bucket] for bucket in self._trained if bucket.traits.counted]
        partial = torch.cat(counted or [torch.zeros(1, device=self._comm.device)]).sum().view(1)
        return self._comm.gather_scalars(partial, label="gradient norm").sum().view(1)

    def update(self, control: Tensor) -> None:
        """The optimizer step, after `step_control` has written `control`."""
        self.gathering.reshard_before_change()  # a forward without a backward may have left old parameters gathered
        self._update.run(control)
        self.reduction.forget()

    def discard_gradients(self) -> None:
        """Drops the gradients since the last step. Every rank must call it."""
        self.reduction.discard()
        self._update.drop_ahead()

    def close(self) -> None:
        """Ends the last update and gives all stores back; raises what went wrong in them. At stage 3 the model is unusable after it."""
        self.reduction.detach()
        with ExitStack() as stack:  # everything is closed, and the first error is raised
            for store in {
                id(s): s for s in (self._stores.optimizer, self._stores.gradients, self._stores.parameters)
            }.values():
                stack.callback(store.close)
                stack.callback(store.flush)
            stack.callback(self._update.close)

    def compile(self, model: nn.Module, **options: object) -> None:
        """torch.compile with `options`: of the whole model, or, where parameters are sharded, of every unit inside its gathering."""
        if any(bucket.traits.shards_parameters for bucket in self.buckets):
            self.gathering.compile(functools.partial(torch.compile, **options))
        else:
            model.forward = torch.compile(model.forward, **options)

    def free_buffers(self) -> None:
        """Gives the memory of buffers that are not in use back: what is gathered and not held, and what gradients pass through."""
        self.gathering.reshard_all()
        self._update.finish()  # its thread uses a pool
        for pool in self._pools:
            pool.drop_free()

    def release_model(self, init_context: ZeroInitContext) -> None:
        """Undoes the building, one bucket whole at a time: sharded parameters become slices in `init_context`, the others stay whole, optimizer
        states are lost. Another Zero may take the model. Every rank must call it."""
        self.gathering.reshard_before_change()
        for bucket in self.buckets:
            if bucket.traits.shards_parameters:
                self.gathering.unshard_untraced(bucket)
                for parameter in bucket.parameters:
                    PartitionedParameter(parameter, init_context=init_context)
                self.gathering.reshard(bucket)
        self.gathering.detach()
        self.close()

    def first_non_finite(self) -> str | None:
        """The first parameter, in order of definition, whose reduced gradient is not finite; of a pipeline's ranks the first's. The same answer
        on every rank."""
        first, names = float("inf"), []
        for bucket in self._trained:
            for piece in bucket.pieces:
                if piece.start in bucket.layout.shard(bucket.comm.rank):
                    bad = self._non_finite_in(bucket, piece=piece)
                    first = min([first, *(len(names) + index for index in bad)])
            names += [placement.name for placement in bucket.layout.placements]
        name = None if first == float("inf") else names[int(first)]
        everyone = self._comm.gather_objects(
            (first == float("inf"), self._stage, first, name)
        )  # `first` counts own names
        return min(everyone, key=lambda found: found[:3])[3]

    def _non_finite_in(self, bucket: Bucket, *, piece: Piece) -> list[int]:
        """Numbers of the bucket's parameters with a non-finite gradient in `piece`."""
        gradient = (
            piece.of(bucket.gradient) if piece.gradient is None else self._stores.gradients.fetch(piece.gradient).wait()
        )
        number = {placement.name: index for index, placement in enumerate(bucket.layout.placements)}
        bad = [
            number[fragment.name]
            for fragment in bucket.layout.fragments(range(piece.start, piece.stop))
            if not gradient[fragment.offset - piece.start :][: fragment.stop - fragment.start].isfinite().all()
        ]
        if piece.gradient is not None:
            self._stores.gradients.release(piece.gradient)
        return bad

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """All parameters are whole inside: for reading, and for small models. Every rank must enter."""
        sharded = [bucket for bucket in self.buckets if bucket.state is ParameterState.sharded]
        for bucket in sharded:
            self.gathering.unshard_untraced(bucket)
        try:
            yield
        finally:
            for bucket in sharded:
                self.gathering.reshard(bucket)

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, parameter) one bucket at a time, so that no more than one is whole. Every rank must iterate to the end."""
        for bucket in self.buckets:
            was_sharded = bucket.state is ParameterState.sharded
            if was_sharded:
                self.gathering.unshard_untraced(bucket)
            for parameter, placement in zip(bucket.parameters, bucket.layout.placements, strict=True):
                yield placement.name, parameter.data
            if was_sharded:
                self.gathering.reshard(bucket)

    # State, for checkpoints

    def state_shards(self, *, aside: bool = False) -> Iterator[StateShard]:
        """Every state element of the model exactly once over all ranks, piece by piece. Values are valid until the next one.

        aside: for another thread than the training's, after `hold_state`; pieces pass through memory of their own.
        """
        self._update.await_last() if aside else self._update.finish()
        for bucket, piece in self._own_pieces():
            try:
                for kind, values in self._piece_state(bucket, piece=piece, aside=aside):
                    yield from self._shards(bucket, piece=piece, kind=kind, values=values)
            finally:  # also when the caller stops early
                if piece.states is not None and not aside:
                    self._stores.optimizer.release(piece.states)

    def hold_state(self, *, until: Callable[[], None]) -> None:
        """Before the next update, or whatever else changes the state, `until()` is called once."""
        self._update.delay(until)

    def state_slices(self) -> Iterator[StateSlice]:
        """What `state_shards` will yield, in the same order, without the values."""
        for bucket, piece in self._own_pieces():
            kinds = {"parameter": bucket.traits.dtype}
            if piece.states is not None:
                kinds = dict.fromkeys(("master", *self.optimizer.state_names), torch.float32)
            for kind, dtype in kinds.items():
                for fragment in bucket.layout.fragments(range(piece.start, piece.stop)):
                    yield StateSlice(
                        name=fragment.name,
                        kind=kind,
                        part=self.part_of(fragment.name, bucket=bucket),
                        dtype=dtype,
                        start=fragment.start,
                        stop=fragment.stop,
                    )

    def part_of(self, name: str, *, bucket: Bucket) -> Part:
        """What this rank holds of parameter `name`, which lies in `bucket`."""
        shape = next(placement.shape for placement in bucket.layout.placements if placement.name == name)
        return self.parts.get(name) or Part.everything(shape)

    def load_state(self, read: Callable[..., Tensor], *, keep: Container[str] = ()) -> None:
        """Sets this rank's state from `read(name=, kind=, start=, stop=) -> Tensor [stop - start]`, piece by piece.

        keep: names of parameters that stay as they are, with their optimizer states.
        Local: when all ranks have come through, all call `share_parameters`.
        """
        self.gathering.reshard_before_change()
        self._update.finish()
        for bucket in self.buckets:
            if all(placement.name in keep for placement in bucket.layout.placements):
                continue
            for piece in bucket.pieces:
                kind = "master" if bucket.traits.trainable else "parameter"
                # One piece in memory at a time: the weights are gone before the moments come.
                self._builder.set_master(
                    bucket, piece=piece, values=self._read(bucket, piece=piece, kind=kind, read=read, keep=keep)
                )
                if bucket.traits.trainable:
                    self._load_moments(bucket, piece=piece, read=read, keep=keep)

    def share_parameters(self) -> None:
        """After `load_state`, a collective call: replicated parameters become whole on all ranks."""
        for bucket in self.buckets:
            if not bucket.traits.shards_parameters:
                bucket.comm.all_gather(bucket.full, label=bucket.traits.name).wait()

    def _own_pieces(self) -> Iterator[tuple[Bucket, Piece]]:
        """Stage 0 keeps all shards; each rank answers for its own, and one of several copies for all."""
        for bucket in self.buckets:
            own = bucket.layout.shard(bucket.comm.rank)
            if bucket.traits.counted:
                yield from ((bucket, piece) for piece in bucket.pieces if piece.start in own)

    def _load_moments(self, bucket: Bucket, *, piece: Piece, read: Callable[..., Tensor], keep: Container[str]) -> None:
        states = self._stores.optimizer.fetch(piece.states).wait()
        moments = states[states.shape[0] - len(self.optimizer.state_names) :]
        try:
            for kind, moment in zip(self.optimizer.state_names, moments, strict=True):
                moment.copy_(self._read(bucket, piece=piece, kind=kind, read=read, keep=keep, current=moment))
        finally:  # a failed read must not keep a buffer of the pool
            self._stores.optimizer.put(piece.states, value=states).wait()

    def _read(
        self,
        bucket: Bucket,
        *,
        piece: Piece,
        kind: str,
        read: Callable[..., Tensor],
        keep: Container[str],
        current: Tensor | None = None,
    ) -> Tensor:
        """New values of a piece, fp32 on the CPU. current: those that it has, if they are at hand."""
        fragments = list(bucket.layout.fragments(range(piece.start, piece.stop)))
        values = torch.zeros(piece.stop - piece.start, dtype=torch.float32)
        if any(fragment.name in keep for fragment in fragments):
            values.copy_(self._weights_of(bucket, piece=piece) if current is None else current)
        for fragment in fragments:
            if fragment.name in keep:
                continue
            place = values[fragment.offset - piece.start :][: fragment.stop - fragment.start]
            place.copy_(read(name=fragment.name, kind=kind, start=fragment.start, stop=fragment.stop))
        return values

    def _weights_of(self, bucket: Bucket, *, piece: Piece) -> Tensor:
        """The master weights of a piece, or the values of a frozen one: a copy."""
        try:
            return next(self._piece_state(bucket, piece=piece))[1].clone()
        finally:
            if piece.states is not None:
                self._stores.optimizer.release(piece.states)

    def _piece_state(self, bucket: Bucket, *, piece: Piece, aside: bool = False) -> Iterator[tuple[str, Tensor]]:
        if piece.states is None:
            yield "parameter", self._parameter(bucket, piece=piece)
            return
        if aside:
            memory = torch.empty(piece.states.shape, dtype=piece.states.dtype)
            states = self._stores.optimizer.fetch_into(piece.states, out=memory).wait()
        else:
            states = self._stores.optimizer.fetch(piece.states).wait()
        num_moments = len(self.optimizer.state_names)
        has_master = states.shape[0] > num_moments
        yield "master", states[0] if has_master else self._parameter(bucket, piece=piece)
        yield from zip(self.optimizer.state_names, states[states.shape[0] - num_moments :], strict=True)

    def _parameter(self, bucket: Bucket, *, piece: Piece) -> Tensor:
        if not bucket.traits.shards_parameters:
            return piece.of(bucket.full)
        out = torch.empty(piece.stop - piece.start, dtype=bucket.traits.dtype, device=self._comm.device)
        self._stores.parameters.fetch_into(piece.parameter, out=out).wait()
        return out

    def _shards(self, bucket: Bucket, *, piece: Piece, kind: str, values: Tensor) -> Iterator[StateShard]:
        for fragment in bucket.layout.fragments(range(piece.start, piece.stop)):
            offset = fragment.offset - piece.start
            yield StateShard(
                name=fragment.name,
                kind=kind,
                part=self.part_of(fragment.name, bucket=bucket),
                start=fragment.start,
                stop=fragment.stop,
                value=values[offset : offset + fragment.stop - fragment.start],
            )
