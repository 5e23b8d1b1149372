"""Assigns matrices to the ranks that orthogonalise them, and their elements to transfers: arithmetic on layouts, without tensors.

Matrices are handled in rounds, so that the memory for them does not grow with the model. In a round every rank sends its ranges of each
matrix to the matrix's owner, and gets the same ranges of the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

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
