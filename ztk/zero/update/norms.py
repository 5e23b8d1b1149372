"""Computes LAMB's norms of every parameter's weights and update, over the shards that hold it.

They are computed before the update over pieces, in the training thread, because this communicates. Every rank updates the averages of its
ranges, in the store, and adds up squares; the ranks exchange two numbers per parameter. The update over pieces computes the same direction
again from the averages, so that no further state is needed; it may run during the next forward. States on a disk are therefore read and
written twice per step.

Squares add up in float64: the cuts of pieces change the 16th digit, and the norms are rounded to the 7th.
Ratios have the dtype fp32.
"""

import torch
from torch import Tensor

from ztk.core.runtime import Comm
from ztk.optim.lamb import Lamb
from ztk.zero.buckets.bucket import Bucket
from ztk.zero.buckets.context import ZeroContext
from ztk.zero.buckets.layout import Placement
from ztk.zero.update.control_tables import ControlTables
from ztk.zero.update.fetching import FetchedStates, PieceFetcher


class TrustRatios:
    """Updates LAMB's averages and computes each parameter's factor. ratios: parameter -> its factor in this step, a scalar []."""

    def __init__(self, buckets: list[Bucket], *, lamb: Lamb, fetcher: PieceFetcher, context: ZeroContext) -> None:
        """buckets: the trained ones, in the order of the update."""
        self._lamb, self._fetcher, self._clock = lamb, fetcher, context.clock
        self._group_of = {placement.name: placement.group for placement in _placements(buckets)}
        by_comm: dict[int, list[Bucket]] = {}
        for bucket in buckets:
            by_comm.setdefault(id(bucket.comm), []).append(bucket)
        self._by_comm = list(by_comm.values())
        self.ratios: dict[str, Tensor] = {}

    def run(self, tables: ControlTables, *, skipped: frozenset[str]) -> None:
        """Sets `ratios`, in the memory of `tables.nearest`. A blocking collective call of the ranks of every bucket.

        tables: control tables of a step that runs. skipped: names of parameters that keep their averages.
        """
        self.ratios = {}
        for buckets in self._by_comm:
            self.ratios |= self._run(buckets, tables=tables, skipped=skipped)

    def _run(self, buckets: list[Bucket], *, tables: ControlTables, skipped: frozenset[str]) -> dict[str, Tensor]:
        numbers = {placement.name: index for index, placement in enumerate(_placements(buckets))}
        squares = torch.zeros(len(numbers), 2, dtype=torch.float64, device=tables.nearest.device)
        for fetched in self._fetcher.fetch_states((bucket, piece) for bucket in buckets for piece in bucket.pieces):
            own, control = fetched.piece in fetched.bucket.own_pieces, tables.of(fetched.piece)
            for fragment in fetched.piece.fragments:
                if fragment.name not in skipped:
                    found = self._visit(fetched, place=fragment.place, control=control[self._group_of[fragment.name]])
                    if own:  # at stage 0 every rank updates everything, and counts its shard
                        squares[numbers[fragment.name]] += found.to(squares.device)
        ratios = self._lamb.ratio(self._sum_over_ranks(squares, comm=buckets[0].comm))
        return {name: ratios[index] for name, index in numbers.items()}

    def _visit(self, fetched: FetchedStates, *, place: slice, control: Tensor) -> Tensor:
        """Updates the averages of a range. Returns the squared norms of its weights and of its update, float64 [2]."""
        master = fetched.master[place]
        averages = {name: fetched.rows[name][place] for name in ("exp_avg", "exp_avg_sq")}
        self._lamb.average(grad=fetched.gradient[place], control=control, **averages)
        update = self._lamb.direction(master, control=control, **averages)
        norms = [torch.linalg.vector_norm(values, dtype=torch.float64) for values in (master, update)]
        return torch.stack(norms).square_()

    def _sum_over_ranks(self, squares: Tensor, *, comm: Comm) -> Tensor:
        with self._clock.phase("communication"):
            of_ranks = comm.gather_scalars(squares.to(comm.device), label="norms of parameters and updates")
        total = of_ranks[0].clone()
        for rank in range(1, comm.size):  # in the same order on all ranks
            total += of_ranks[rank]
        return total.to(squares.device)


def _placements(buckets: list[Bucket]) -> list[Placement]:
    return [placement for bucket in buckets for placement in bucket.layout.placements]
