"""Layout of Muon's states in a piece: elements of matrices have momentum, all others have the moments of AdamW.

The momentum has a slot of its own: a step updates it in one pass over the matrices and the weights in a second one, and each pass only
reads and writes the data it changes. Moments are stored contiguously for the other elements. All rows are float32.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.zero.buckets.layout import Segment

MOMENTUM, MOMENTS = "exp_avg", ("exp_avg", "exp_avg_sq")  # as a checkpoint names them


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Moments:
    """matrices, others: the ranges of a piece [n] with momentum and with moments; together they cover the piece."""

    matrices: tuple[slice, ...]
    others: tuple[slice, ...]

    @staticmethod
    def of(segments: Iterable[Segment], *, start: int, matrix_groups: frozenset[int]) -> "Moments | None":
        """From the segments of a piece that begins at `start` of its bucket. None if it contains no element of a matrix."""
        places = [(slice(cut.start - start, cut.stop - start), cut.group in matrix_groups) for cut in segments]
        if not any(is_matrix for _, is_matrix in places):
            return None
        return Moments(
            matrices=tuple(place for place, is_matrix in places if is_matrix),
            others=tuple(place for place, is_matrix in places if not is_matrix),
        )

    @property
    def num_momentum(self) -> int:
        """Elements with momentum."""
        return sum(place.stop - place.start for place in self.matrices)

    @property
    def num_moments(self) -> int:
        """Elements with moments."""
        return sum(place.stop - place.start for place in self.others)

    def momentum_of(self, place: slice) -> slice:
        """The elements of `place`, within one matrix, as a slice of the momentum."""
        return _found(place, among=self.matrices)

    def moments_of(self, place: slice) -> slice:
        """The elements of `place`, all with moments, as a slice of the moments' rows."""
        return _found(place, among=self.others)

    def has_moments(self, place: slice) -> bool:
        """Whether the elements of `place`, within one segment, have moments."""
        return any(other.start <= place.start < other.stop for other in self.others)

    def spread(self, rows: Mapping[str, Tensor], *, momentum: Tensor, numel: int) -> dict[str, Tensor]:
        """`rows`, float32, with full copies [numel] of the moments: zeros for elements without moments."""
        full = dict(rows)
        for name in MOMENTS:
            full[name] = torch.zeros(numel, dtype=momentum.dtype, device=momentum.device)
            for place in self.others:
                full[name][place].copy_(rows[name][self.moments_of(place)])
        for place in self.matrices:
            full[MOMENTUM][place].copy_(momentum[self.momentum_of(place)])
        return full

    def gather(self, full: Mapping[str, Tensor], *, rows: Mapping[str, Tensor], momentum: Tensor) -> None:
        """Writes the result of `spread` back into `rows` and `momentum`, float32. Elements without a place are dropped: they were 0 or
        unused."""
        for name in MOMENTS:
            for place in self.others:
                rows[name][self.moments_of(place)].copy_(full[name][place])
        for place in self.matrices:
            momentum[self.momentum_of(place)].copy_(full[MOMENTUM][place])


def _found(place: slice, *, among: tuple[slice, ...]) -> slice:
    before = 0
    for other in among:
        if other.start <= place.start < other.stop:
            first = before + place.start - other.start
            return slice(first, first + place.stop - place.start)
        before += other.stop - other.start
    raise AssertionError(f"{place} is in none of {among}")
