"""Process groups along the axes of parallelism.

Rank = (((pp * DP + dp) * CP + cp) * SP + sp) * TP + tp. Tensor parallelism needs the fastest links, so its ranks are neighbours; pipeline
stages communicate least and are farthest apart. Ranks that differ only in dp, cp or sp hold the same part of the model: they are the
`data` group, over which ZeRO shards it. Expert parallelism divides that group again: `ep` neighbours hold different experts, the ranks of
`expert_data` hold the same ones.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ztk.core.policies.topology import Degrees
from ztk.core.runtime.comm import Comm, CommCounters

# axis -> how the ranks [pp, dp, cp, sp, tp] become groups [number of groups, size]
_GROUPS = {
    "pp": "pp dp cp sp tp -> (dp cp sp tp) pp",
    "data": "pp dp cp sp tp -> (pp tp) (dp cp sp)",
    "cp": "pp dp cp sp tp -> (pp dp sp tp) cp",
    "sp": "pp dp cp sp tp -> (pp dp cp tp) sp",
    "tp": "pp dp cp sp tp -> (pp dp cp sp) tp",
}
_DATA_GROUPS = {  # the same, starting from the data groups
    "ep": "rest (expert_data ep) -> (rest expert_data) ep",
    "expert_data": "rest (expert_data ep) -> (rest ep) expert_data",
    "intra_node": "rest (inter_node intra_node) -> (rest inter_node) intra_node",
    "inter_node": "rest (inter_node intra_node) -> (rest intra_node) inter_node",
}
AXES = (*_GROUPS, *_DATA_GROUPS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology(Degrees):
    """Degrees of parallelism. The remaining factor of the world size is data parallelism.

    pipeline: stages. tensor: shards of each layer. context: parts of each sequence, between which attention goes around a ring. sequence:
    parts of each of those, which exchange sequence for heads (Ulysses). expert: ranks over which a layer's experts are distributed; they
    are data-parallel ranks too, so this degree does not multiply the number of ranks. intra_node: ranks of the data group that share a
    node's fast links, see `ztk.zero.buckets.exchange`; 1 disables it.

    Raises:
        ValueError: a degree is less than 1.
    """

    pipeline: int = 1
    tensor: int = 1
    sequence: int = 1
    expert: int = 1
    intra_node: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for name in ("pipeline", "tensor", "sequence", "expert", "intra_node", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"topology.{name}={getattr(self, name)}: must be 1 or more")

    def replicas(self, *, world_size: int) -> int:
        """Ranks along dp: how many different batches there are.

        Raises:
            ValueError: the degrees do not fit the world size.
        """
        data = world_size // (self.pipeline * self.tensor)
        if self.divide(world_size) and data % self.intra_node:
            raise ValueError(
                f"{data} data-parallel ranks cannot be cut into groups of zero.hpz_partition_size={self.intra_node}: use a divisor"
            )
        if not self.divide(world_size):
            raise ValueError(
                f"{world_size} ranks cannot be cut into topology.pipeline={self.pipeline} x topology.tensor={self.tensor} x "
                f"{self._context}topology.sequence={self.sequence} with topology.expert={self.expert}: use launch.ranks={self.min_ranks} or a "
                "multiple of it"
            )
        return world_size // self.model_ranks

    @property
    def _context(self) -> str:
        return f"topology.context={self.context} x " if self.context > 1 else ""

    def groups(self, axis: str, *, world_size: int) -> list[tuple[int, ...]]:
        """All groups of ranks along `axis` (one of AXES), each in order of the axis."""
        ranks = torch.arange(world_size).view(
            self.pipeline, self.replicas(world_size=world_size), self.context, self.sequence, self.tensor
        )
        if axis in _GROUPS:
            groups = rearrange(ranks, _GROUPS[axis])
        else:
            degree = {"ep": self.expert} if "ep" in _DATA_GROUPS[axis] else {"intra_node": self.intra_node}
            groups = rearrange(rearrange(ranks, _GROUPS["data"]), _DATA_GROUPS[axis], **degree)
        return [tuple(group) for group in groups.tolist()]

    def sharing(self, axis: str, *, world_size: int) -> str | None:
        """The axis whose communicators `axis` uses because it has the same groups: "data", or "world". None if it has its own."""
        groups = self.groups(axis, world_size=world_size)
        if axis == "data" and len(groups) == 1:
            return "world"
        of_data = axis in ("expert_data", "intra_node", "inter_node") and groups == self.groups(
            "data", world_size=world_size
        )
        return "data" if of_data else None

    def connections(self, *, world_size: int) -> "Connections":
        """What `Process.arrange` creates for this topology."""
        cut = [
            groups
            for axis in AXES
            if self.sharing(axis, world_size=world_size) is None
            and len((groups := self.groups(axis, world_size=world_size))[0]) > 1
        ]
        neighbours = min(self.pipeline - 1, 2)
        return Connections(
            new_groups=sum(len(groups) for groups in cut), communicators=(world_size > 1) + len(cut) + neighbours
        )

    def replica(self, rank: int, *, world_size: int) -> int:
        """Which batch `rank` works on: its coordinate along dp."""
        return rank // (self.sequence_ranks * self.tensor) % self.replicas(world_size=world_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Connections:
    """Connections of a topology at the start of a run.

    new_groups: calls of `torch.distributed.new_group` on every rank, which makes them for the groups of other ranks, too. communicators: of
    NCCL on one rank: the world's, one per cut axis, and one for the messages to each of at most two neighbours in a pipeline.
    """

    new_groups: int
    communicators: int


class Mesh:
    """One rank's view of the world: a `Comm` per axis (of one rank where the axis is not cut)."""

    def __init__(self, topology: Topology, *, world: Comm, comms: dict[str, Comm]) -> None:
        self.topology, self.world = topology, world
        self.replicas = topology.replicas(world_size=world.size)
        self.replica = topology.replica(world.rank, world_size=world.size)
        self._comms = comms

    def comm(self, axis: str) -> Comm:
        """The collectives along one of AXES."""
        return self._comms[axis]

    @property
    def comms(self) -> list[Comm]:
        """All different communicators, the world's first."""
        return list(dict.fromkeys([self.world, *self._comms.values()]))

    @property
    def counters(self) -> "MeshCounters":
        """The sum of all axes' counters."""
        return MeshCounters([comm.counters for comm in self.comms])

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes losses."""
        stages = self.comm("pp")
        return stages.rank == stages.size - 1

    @property
    def is_alone(self) -> bool:
        """Whether every replica is one rank: no two ranks work on the same sequences."""
        return self.topology.model_ranks == 1

    @property
    def leaders(self) -> list[int]:
        """The first rank of every replica that computes losses, in the order of the replicas."""
        unit = self.topology.sequence_ranks * self.topology.tensor
        first = self.world.size // self.topology.pipeline * (self.topology.pipeline - 1)
        return [first + replica * unit for replica in range(self.replicas)]

    @property
    def is_leader(self) -> bool:
        """Whether this rank is one of `leaders`."""
        return self.world.rank in self.leaders

    def gather_scalars(self, own: Tensor, *, label: str) -> Tensor:
        """Values [n] of every replica's leader on every rank, [replicas, n]. A collective call."""
        found = self.world.gather_scalars(own, label=label)
        return found if self.is_alone else found[self.leaders]

    def gather_objects(self, own: Any) -> list[Any]:
        """Objects of every replica's leader on every rank, in the order of the replicas. A collective call."""
        found = self.world.gather_objects(own)
        return found if self.is_alone else [found[rank] for rank in self.leaders]

    def close(self) -> None:
        """Closes the communicators that the mesh opened; the world's stays open."""
        for comm in self.comms:
            if comm is not self.world:
                comm.close()


class MeshCounters:
    """Several counters read as one."""

    def __init__(self, counters: Iterable[CommCounters]) -> None:
        self._counters = list(counters)

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes by kind."""
        return self._total("bytes")

    @property
    def elements(self) -> dict[str, int]:
        """Elements by kind."""
        return self._total("elements")

    @property
    def calls(self) -> dict[str, int]:
        """Calls by kind."""
        return self._total("calls")

    @property
    def busy_seconds(self) -> float:
        """Seconds that the transports worked."""
        return sum(counters.busy_seconds for counters in self._counters)

    @property
    def wait_seconds(self) -> float:
        """Seconds that the step waited for them."""
        return sum(counters.wait_seconds for counters in self._counters)

    def reset(self) -> None:
        """Everything back to zero."""
        for counters in self._counters:
            counters.reset()

    def _total(self, name: str) -> dict[str, int]:
        tables = [getattr(counters, name) for counters in self._counters]
        return {kind: sum(table.get(kind, 0) for table in tables) for table in tables for kind in table}
