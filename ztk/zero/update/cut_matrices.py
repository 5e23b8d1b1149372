"""Muon's matrices that are split over tensor-parallel ranks: each is assembled on one of these ranks.

The ranks of one data-parallel coordinate own parts of the same matrices. The matrices are divided among them by FLOPs. An all-to-all
brings a matrix's parts to the rank that orthogonalises it, and a second one returns the parts of the result. Bytes are counted as "muon".
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from ztk.core.runtime import PhaseClock
from ztk.core.runtime.part import Part
from ztk.optim.muon import Muon
from ztk.zero.buckets.context import ZeroContext
from ztk.zero.update.owners import Matrix, balance


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
        """(elements, FLOPs) of a rank's part of `shape`: of the largest part and an equal share, so that all ranks plan alike."""
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
