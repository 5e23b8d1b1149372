"""Muon's matrices: each is collected from the shards, orthogonalised once by its owner, and returned to the shards.

Momentum and weights are updated elementwise, where they are stored; orthogonalisation needs the full matrix. Per round of matrices:

1. every rank updates the momentum of its ranges, in the store, and writes their directions into one buffer;
2. an all-to-all brings the ranges to the matrices' owners, who orthogonalise; a second one brings the results back;
3. the results replace the gradients.

Then the update over pieces applies them like gradients. All this runs in the training thread, because it communicates; the
update over pieces may run during the next forward. At stage 0 every rank has every direction, and only the results are sent.
If tensor-parallel ranks hold parts of a matrix, its owners assemble them first: see `CutMatrices`.
Bytes are counted as "muon": a rank's elements of all matrices in each direction. Directions have Muon's dtype.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ztk.core.runtime import Comm, PhaseClock
from ztk.core.runtime.buffers import BufferPool
from ztk.core.runtime.part import Part
from ztk.optim import GroupTable
from ztk.optim.muon import Muon
from ztk.zero.buckets.bucket import Bucket
from ztk.zero.buckets.context import ZeroContext
from ztk.zero.buckets.piece import Piece
from ztk.zero.update.control_tables import ControlTables
from ztk.zero.update.fetching import PieceFetcher
from ztk.zero.update.piece_states import PieceStates

# Assigns matrices to the ranks that orthogonalise them, and their elements to transfers: arithmetic on layouts, without tensors.
#
# Matrices are handled in rounds, so that the memory for them does not grow with the model. In a round every rank sends its ranges of each
# matrix to the matrix's owner, and gets the same ranges of the result.

ROUND_ELEMENTS = 2**25  # of matrices, per rank and round: 64 MiB in 16 bit


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """A parameter [rows, columns], or the part of it that this rank's data group has.

    held: by rank, the flat elements that the rank updates. planned: its number of elements, and cost: the FLOPs of its orthogonalisation;
    both are the same on all ranks with other parts.
    """

    name: str
    shape: tuple[int, ...]
    held: tuple[range, ...]
    planned: int
    cost: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """Matrices that are handled together. owners: by matrix, the rank that orthogonalises it."""

    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]

    def owned(self, rank: int) -> list[Matrix]:
        """The matrices of `rank`, in order."""
        return [matrix for matrix, owner in zip(self.matrices, self.owners, strict=True) if owner == rank]

    def sent(self, rank: int) -> list[int]:
        """By rank, the number of elements that `rank` has of that rank's matrices."""
        counts = [0] * len(self.matrices[0].held)
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            counts[owner] += len(matrix.held[rank])
        return counts

    def received(self, rank: int) -> list[int]:
        """By rank, the number of elements that it has of the matrices of `rank`."""
        own = self.owned(rank)
        return [sum(len(matrix.held[other]) for matrix in own) for other in range(len(self.matrices[0].held))]

    def places(self, rank: int) -> dict[str, int]:
        """Offsets of the ranges of `rank` in its buffer, by matrix, ordered by owner from rank 0."""
        places, offset = {}, 0
        ordered = sorted(zip(self.owners, self.matrices, strict=True), key=lambda pair: pair[0])  # stable
        for _, matrix in ordered:
            places[matrix.name] = offset
            offset += len(matrix.held[rank])
        return places


def plan_rounds(matrices: Sequence[Matrix], *, num_ranks: int, limit: int = ROUND_ELEMENTS) -> list[Round]:
    """Rounds of consecutive matrices with at most `limit` elements per rank, or one matrix. The same on every rank."""
    rounds: list[list[Matrix]] = []
    room = 0
    for matrix in matrices:
        if matrix.planned > room:
            rounds.append([])
            room = num_ranks * limit
        rounds[-1].append(matrix)
        room -= matrix.planned
    return [
        Round(matrices=tuple(chosen), owners=balance([matrix.cost for matrix in chosen], num_ranks=num_ranks))
        for chosen in rounds
    ]


def balance(costs: Sequence[int], *, num_ranks: int) -> tuple[int, ...]:
    """The rank of each item: the most expensive first, each to the rank with the least so far, the first of equals.

    No rank has more than 4/3 of the best possible largest load (Graham 1969).
    """
    loads, owners = [0] * num_ranks, [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        owners[item] = rank = loads.index(min(loads))
        loads[rank] += costs[item]
    return tuple(owners)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Batch:
    """A round among the ranks of `comm`, this rank's pieces with ranges of its matrices, and their parameter groups by name.

    places: offsets of a matrix's ranges among this rank's. own: the matrices that this rank orthogonalises. to_owners: elements by rank
    that this rank has of that rank's matrices. from_ranks: by rank, elements that it has of this rank's matrices. Computed once, because
    both grow with the number of ranks.
    """

    comm: Comm
    round: Round
    pieces: tuple[tuple[Bucket, Piece], ...]
    groups: dict[str, int]
    places: dict[str, int]
    own: tuple[Matrix, ...]
    to_owners: tuple[int, ...]
    from_ranks: tuple[int, ...]


class MatrixUpdate:
    """Turns the gradients of Muon's matrices into orthogonalised directions. pool: holds buffers for them."""

    def __init__(self, buckets: list[Bucket], *, muon: Muon, fetcher: PieceFetcher, context: ZeroContext) -> None:
        """buckets: the trained ones, in the order of the update."""
        self._muon, self._fetcher, self._clock, self._states = muon, fetcher, context.clock, PieceStates(context)
        self._is_replicated = not context.policy.shards_optimizer  # every rank updates everything
        self._cut = CutMatrices(muon=muon, context=context)
        self.pool = BufferPool(device=context.device, ledger=context.ledger, category="matrices")
        self._batches = list(self._plan(buckets, groups=context.groups))

    @property
    def pieces(self) -> list[tuple[Bucket, Piece]]:
        """The pieces with matrices, in the order of their first fetch."""
        return list(dict.fromkeys(entry for batch in self._batches for entry in batch.pieces))

    def run(self, tables: ControlTables, *, skipped: frozenset[str]) -> None:
        """Replaces the gradients of matrices by directions to step along. A collective call of the ranks of every bucket; waits.

        tables: control tables of a step that is not skipped. skipped: names of parameters that keep their momentum.
        """
        for batch in self._batches:
            self._run_batch(batch, tables=tables, skipped=skipped)

    # Grouping into rounds

    def _plan(self, buckets: list[Bucket], *, groups: GroupTable) -> Iterator[_Batch]:
        comms = list({id(bucket.comm): bucket.comm for bucket in buckets}.values())
        for comm in comms:
            own = [bucket for bucket in buckets if bucket.comm is comm]
            of_name = {
                placement.name: (bucket, placement)
                for bucket in own
                for placement in bucket.layout.placements
                if groups.rows[placement.group].muon_scale
            }
            matrices = [
                Matrix(
                    name=name,
                    shape=placement.shape,
                    held=tuple(
                        self._held(bucket, start=placement.offset, stop=placement.stop, rank=rank)
                        for rank in range(comm.size)
                    ),
                    planned=planned[0],
                    cost=planned[1],
                )
                for name, (bucket, placement) in of_name.items()
                for planned in (self._cut.planned(name, shape=placement.shape),)
            ]
            for planned in plan_rounds(matrices, num_ranks=comm.size):
                names = {matrix.name for matrix in planned.matrices}
                touched = dict.fromkeys(of_name[matrix.name][0] for matrix in planned.matrices)
                yield _Batch(
                    comm=comm,
                    round=planned,
                    pieces=tuple(
                        (bucket, piece)
                        for bucket in touched
                        for piece in bucket.pieces
                        if any(fragment.name in names for fragment in piece.fragments)
                    ),
                    groups={name: of_name[name][1].group for name in names},
                    places=planned.places(comm.rank),
                    own=tuple(planned.owned(comm.rank)),
                    to_owners=tuple(planned.sent(comm.rank)),
                    from_ranks=tuple(planned.received(comm.rank)),
                )

    def _held(self, bucket: Bucket, *, start: int, stop: int, rank: int) -> range:
        """The flat elements, updated by `rank`, of a parameter at [start, stop) of the bucket."""
        if self._is_replicated:
            return range(stop - start)
        shard = bucket.layout.shard(rank)
        first, last = max(start, shard.start), min(stop, shard.stop)
        return range(first - start, max(first, last) - start)

    # One round

    def _run_batch(self, batch: _Batch, *, tables: ControlTables, skipped: frozenset[str]) -> None:
        rank = batch.comm.rank
        numel = sum(len(matrix.held[rank]) for matrix in batch.round.matrices)
        parts = self.pool.acquire(numel, dtype=self._muon.dtype)
        places = {matrix.name: batch.places[matrix.name] - matrix.held[rank].start for matrix in batch.round.matrices}
        self._update_momentum(batch, parts=parts, places=places, tables=tables, skipped=skipped)
        results = self._orthogonalise(batch, parts=parts)
        self._give_back(batch, results=results, parts=parts)
        for bucket, piece in batch.pieces:
            with self._states.gradient(bucket, piece=piece, changes=True) as gradient:
                for fragment in piece.fragments:
                    if fragment.name in places:
                        first = places[fragment.name] + fragment.start
                        gradient[fragment.place].copy_(parts[first : first + fragment.stop - fragment.start])
        self.pool.release(parts)

    def _update_momentum(
        self,
        batch: _Batch,
        *,
        parts: Tensor,
        places: dict[str, int],
        tables: ControlTables,
        skipped: frozenset[str],
    ) -> None:
        """Fills `parts` with the directions of this rank's ranges."""
        for fetched in self._fetcher.fetch_momentum(batch.pieces):
            moments = fetched.piece.moments
            assert moments is not None, "the piece has elements of matrices"
            control = tables.of(fetched.piece)
            for fragment in fetched.piece.fragments:
                if fragment.name not in places:
                    continue
                momentum = fetched.momentum[moments.momentum_of(fragment.place)]
                direction = self._muon.direction(
                    momentum.clone() if fragment.name in skipped else momentum,
                    grad=fetched.gradient[fragment.place],
                    control=control[batch.groups[fragment.name]],
                )
                first = places[fragment.name] + fragment.start
                parts[first : first + fragment.stop - fragment.start].copy_(direction)

    def _orthogonalise(self, batch: _Batch, *, parts: Tensor) -> list[Tensor]:
        """The results of this rank's matrices, each [numel]."""
        own = batch.own
        if self._is_replicated:
            flat = [parts[batch.places[matrix.name] :][: matrix.numel].clone() for matrix in own]
        else:
            flat = self._collect(batch, parts=parts)
        return self._cut.orthogonalised(flat, matrices=own)

    def _collect(self, batch: _Batch, *, parts: Tensor) -> list[Tensor]:
        """This rank's matrices, each [numel] in separate memory, so that all begin at an aligned address."""
        comm, own = batch.comm, batch.own
        received = self.pool.acquire(sum(batch.from_ranks), dtype=parts.dtype)
        self._move(
            batch, source=parts, out=received, send=batch.to_owners, receive=batch.from_ranks, label="directions"
        )
        flat = [torch.empty(matrix.numel, dtype=parts.dtype, device=parts.device) for matrix in own]
        offset = 0
        for rank in range(comm.size):
            for values, matrix in zip(flat, own, strict=True):
                held = matrix.held[rank]
                values[held.start : held.stop].copy_(received[offset : offset + len(held)])
                offset += len(held)
        self.pool.release(received)
        return flat

    def _give_back(self, batch: _Batch, *, results: list[Tensor], parts: Tensor) -> None:
        """Fills `parts` with the results of this rank's ranges."""
        comm, own = batch.comm, batch.own
        sent = self.pool.acquire(sum(batch.from_ranks), dtype=parts.dtype)
        offset = 0
        for rank in range(comm.size):
            for values, matrix in zip(results, own, strict=True):
                held = matrix.held[rank]
                sent[offset : offset + len(held)].copy_(values[held.start : held.stop])
                offset += len(held)
        self._move(batch, source=sent, out=parts, send=batch.from_ranks, receive=batch.to_owners, label="results")
        self.pool.release(sent)

    def _move(
        self, batch: _Batch, *, source: Tensor, out: Tensor, send: Sequence[int], receive: Sequence[int], label: str
    ) -> None:
        if batch.comm.size == 1:
            out.copy_(source)
            return
        label = f"{label} of {len(batch.round.matrices)} matrices from {batch.round.matrices[0].name}"
        with self._clock.phase("communication"):
            batch.comm.all_to_all_rows(
                source.view(-1, 1), out=out.view(-1, 1), send=send, receive=receive, label=label, kind="muon"
            ).wait()


class CutMatrices:
    """Orthogonalises matrices, including those that are split over the tensor-parallel ranks of the mesh."""

    def __init__(self, *, muon: Muon, context: ZeroContext) -> None:
        """A collective call of the tensor-parallel ranks."""
        self._muon, self._comm = muon, context.mesh.comm("tp")
        self._clock: PhaseClock = context.clock
        groups = context.groups
        own = {
            name: part
            for name, part in context.parts.items()
            if not part.is_full and name in groups.row_of and groups.rows[groups.row_of[name]].muon_scale
        }
        self._parts: list[dict[str, Part]] = self._comm.gather_objects(own) if self._comm.size > 1 else [{}]

    def is_cut(self, name: str) -> bool:
        """Whether several ranks have parts of this matrix."""
        return name in self._parts[0]

    def planned(self, name: str, *, shape: Sequence[int]) -> tuple[int, int]:
        """Returns (elements, FLOPs) of a rank's part of `shape`, for the largest part and an equal share, so that all ranks plan alike."""
        if not self.is_cut(name):
            return prod(shape), self._muon.flops(shape)
        parts = [own[name] for own in self._parts]
        return max(part.numel for part in parts), self._muon.flops(parts[0].full_shape) // len(parts)

    def orthogonalised(self, flat: list[Tensor], *, matrices: Sequence[Matrix]) -> list[Tensor]:
        """The results for this rank's parts of `matrices`, each [numel] in Muon's dtype, as in `flat`. A collective call if any matrix is
        split."""
        cut = [matrix for matrix in matrices if self.is_cut(matrix.name)]
        own = {matrix.name: values for values, matrix in zip(flat, matrices, strict=True)}
        found = self._exchanged([(matrix.name, own[matrix.name]) for matrix in cut]) if cut else {}
        return [
            found[matrix.name]
            if matrix.name in found
            else self._muon.orthogonalised(own[matrix.name].view(matrix.shape)).reshape(-1)
            for matrix in matrices
        ]

    def _exchanged(self, own: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Name -> this rank's part of the result, [numel]."""
        comm, names = self._comm, [name for name, _ in own]
        owners = balance([self._muon.flops(self._parts[0][name].full_shape) for name in names], num_ranks=comm.size)
        of_rank = [
            [name for name, owner in zip(names, owners, strict=True) if owner == rank] for rank in range(comm.size)
        ]
        values = dict(own)
        sent = torch.cat([values[name] for rank in range(comm.size) for name in of_rank[rank]])
        outgoing = [sum(values[name].numel() for name in of_rank[rank]) for rank in range(comm.size)]
        mine = of_rank[comm.rank]
        incoming = [sum(parts[name].numel for name in mine) for parts in self._parts]
        received = sent.new_empty(sum(incoming))
        self._move(sent, out=received, send=outgoing, receive=incoming, label=f"parts of {names[0]} and others")
        results = {
            name: self._muon.orthogonalised(matrix) for name, matrix in self._joined(received, names=mine).items()
        }
        back = [parts[name].of(results[name]).reshape(-1) for parts in self._parts for name in mine]
        source = torch.cat(back) if back else sent.new_empty(0)
        out = torch.empty_like(sent)
        self._move(source, out=out, send=incoming, receive=outgoing, label=f"results of {names[0]} and others")
        order = [name for rank in range(comm.size) for name in of_rank[rank]]
        return dict(zip(order, out.split([values[name].numel() for name in order]), strict=True))

    def _joined(self, received: Tensor, *, names: list[str]) -> dict[str, Tensor]:
        """This rank's full matrices, from the parts that arrive rank by rank."""
        full = {name: received.new_empty(self._parts[0][name].full_shape) for name in names}
        offset = 0
        for parts in self._parts:
            for name in names:
                part = parts[name]
                part.of(full[name]).copy_(received[offset : offset + part.numel].view(part.shape))
                offset += part.numel
        return full

    def _move(self, source: Tensor, *, out: Tensor, send: Sequence[int], receive: Sequence[int], label: str) -> None:
        with self._clock.phase("communication"):
            self._comm.all_to_all_rows(
                source.view(-1, 1), out=out.view(-1, 1), send=send, receive=receive, label=label, kind="muon"
            ).wait()
