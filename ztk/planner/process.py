"""One rank of a planned world."""

from dataclasses import dataclass

from ztk.core.runtime import Process, Topology
from ztk.core.runtime.comm import Comm
from ztk.core.runtime.comm.planned import Letters, PlannedComm
from ztk.core.runtime.planned import PLANNED
from ztk.core.runtime.process import all_replicas
from ztk.planner.lanes import Lanes


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedProcess(Process):
    """A rank whose device computes nothing and whose collectives move nothing. lanes: the timeline, or None if time is not planned.
    letters: see `Letters`."""

    lanes: Lanes | None = None
    letters: Letters | None = None

    @staticmethod
    def of(
        rank: int,
        *,
        world_size: int,
        topology: Topology,
        ranks_per_node: int,
        lanes: Lanes | None = None,
        letters: Letters | None = None,
    ) -> Process:
        """Rank `rank` of `world_size`, arranged. letters: messages of its pipeline's ranks. Raises ValueError if the degrees do not fit the
        world."""
        comm = _connect(rank, members=tuple(range(world_size)), ranks_per_node=ranks_per_node, lanes=lanes)
        process = PlannedProcess(
            rank=rank,
            local_rank=rank % ranks_per_node,
            world_size=world_size,
            local_world_size=min(ranks_per_node, world_size),
            device=PLANNED,
            comm=comm,
            mesh=all_replicas(comm),
            timeout_seconds=1.0,
            lanes=lanes,
            letters=letters,
        )
        return process.arrange(topology)

    def _connect(self, groups: list[tuple[int, ...]]) -> Comm:
        own = next(group for group in groups if self.rank in group)
        return _connect(
            self.rank, members=own, ranks_per_node=self.local_world_size, lanes=self.lanes, letters=self.letters
        )


def _connect(
    rank: int,
    *,
    members: tuple[int, ...],
    ranks_per_node: int,
    lanes: Lanes | None,
    letters: Letters | None = None,
) -> Comm:
    in_node = sum(member // ranks_per_node == rank // ranks_per_node for member in members)
    moved = None if lanes is None else lanes.collective(size=len(members), in_node=in_node)
    return PlannedComm(rank=members.index(rank), size=len(members), moved=moved, letters=letters)
