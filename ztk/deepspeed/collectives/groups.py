"""`deepspeed.utils.groups`: process groups of torch.distributed for scripts that communicate themselves.

The functions describe the mesh of the newest engine that is not destroyed. Before there is one, every rank is a data-parallel rank.
Sizes, ranks and lists of ranks are free. A group of fewer ranks than all is created on first use: all its ranks must request it, and
several groups in the same order. Groups are kept, also for later engines.
"""

from dataclasses import dataclass

import torch.distributed as dist

from ztk.core.runtime import Topology
from ztk.deepspeed.engine import owners

# The world of these groups. A program may leave its process group and join another.
_world: dist.ProcessGroup | None = None
_connected: dict[tuple[int, ...], dist.ProcessGroup] = {}
_clone: dist.ProcessGroup | None = None


def members(axis: str, *, topology: Topology, rank: int, world_size: int) -> tuple[int, ...]:
    """Returns the ranks that differ from `rank` only along `axis`, including `rank`: an axis of the mesh, or "dp", which is `data`
    without `sp`.
    """
    groups = topology.groups("data" if axis == "dp" else axis, world_size=world_size)
    own = next(group for group in groups if rank in group)
    return own[own.index(rank) % topology.sequence :: topology.sequence] if axis == "dp" else own


@dataclass(frozen=True, slots=True)
class _Axis:
    """The functions for one axis."""

    name: str

    def ranks(self, group_name: str | None = None) -> list[int]:
        """Returns the ranks in the order of the axis. group_name: only for axes of experts; see `_ExpertAxis`."""
        _need_ranks()
        world_size = dist.get_world_size()
        return list(members(self.name, topology=_topology(), rank=dist.get_rank(), world_size=world_size))

    def size(self, group_name: str | None = None) -> int:
        return len(self.ranks(group_name))

    def rank(self, group_name: str | None = None) -> int:
        """Returns this rank's index in the group."""
        return self.ranks(group_name).index(dist.get_rank())

    def first(self, group_name: str | None = None) -> int:
        """Returns the global rank of the group's first rank."""
        return self.ranks(group_name)[0]

    def group(self, group_name: str | None = None) -> dist.ProcessGroup:
        """Returns the group. Its first call is a collective call of the group's ranks."""
        return _group(tuple(self.ranks(group_name)))


class _ExpertAxis(_Axis):
    """The functions for an axis of experts. They take a group_name: "ep_size_N", where N ranks together hold a layer's experts.

    Raises ValueError if the engine's experts are spread over another number of ranks. N = 1, all experts on every rank, is always valid.
    """

    def ranks(self, group_name: str | None = None) -> list[int]:
        size, own = _expert_size(group_name), _topology().expert
        if size == own:
            return _Axis(self.name).ranks()
        if size == 1:
            return _Axis("data").ranks() if self.name == "expert_data" else [dist.get_rank()]
        raise ValueError(
            f"{group_name}: no engine has experts over {size} ranks, the newest has them over {own}; use ep_size_{own}, or build "
            f"MoE(..., ep_size={size}) and call initialize before"
        )

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """Returns the groups by name, one per existing size."""
        return {name: self.group(name) for name in dict.fromkeys(("ep_size_1", _get_max_expert_size_name()))}


_data, _tensor, _sequence, _sequence_data, _intra_node = (
    _Axis(name) for name in ("dp", "tp", "sp", "data", "intra_node")
)
_expert, _expert_data = _ExpertAxis("ep"), _ExpertAxis("expert_data")

get_data_parallel_group = _get_data_parallel_group = _data.group
get_data_parallel_world_size = _get_data_parallel_world_size = _data.size
get_data_parallel_rank = _get_data_parallel_rank = _data.rank
_get_data_parallel_group_ranks = _data.ranks

get_tensor_model_parallel_group = get_model_parallel_group = _tensor.group
get_tensor_model_parallel_world_size = get_model_parallel_world_size = _get_model_parallel_world_size = _tensor.size
get_tensor_model_parallel_rank = get_model_parallel_rank = _tensor.rank
get_tensor_model_parallel_src_rank = _tensor.first

_get_sequence_parallel_world_size, _get_sequence_parallel_rank = _sequence.size, _sequence.rank
_get_sequence_data_parallel_group = _sequence_data.group
_get_sequence_data_parallel_world_size = _sequence_data.size
_get_sequence_data_parallel_rank = _sequence_data.rank
_get_broadcast_src_rank = _sequence_data.first

_get_expert_parallel_group, _get_expert_parallel_group_dict = _expert.group, _expert.groups
_get_expert_parallel_group_ranks = _expert.ranks
_get_expert_parallel_world_size, _get_expert_parallel_rank = _expert.size, _expert.rank
_get_expert_parallel_src_rank = _expert.first
_get_expert_data_parallel_group, _get_expert_data_parallel_group_dict = _expert_data.group, _expert_data.groups
_get_expert_data_parallel_group_ranks = _expert_data.ranks
_get_expert_data_parallel_world_size, _get_expert_data_parallel_rank = _expert_data.size, _expert_data.rank
_get_expert_broadcast_src_rank = _expert_data.first

_get_zero_param_intra_parallel_group_ranks = _intra_node.ranks
_get_zero_param_intra_parallel_group_world_size = _intra_node.size
_get_zero_param_intra_parallel_rank_in_mygroup = _intra_node.rank


def initialize(ep_size: int = 1, mpu: object = None) -> None:
    """Always raises ValueError, like DeepSpeed but with another class: groups follow from the model and the configuration."""
    raise ValueError(
        f"groups.initialize(ep_size={ep_size}): not needed; pass ep_size to deepspeed.moe.layer.MoE(..., ep_size=), and "
        "mpu to deepspeed.initialize"
    )


def _get_sequence_parallel_group() -> dist.ProcessGroup:
    """Returns the group. Raises KeyError, as in DeepSpeed, without sequence parallelism."""
    if _sequence.size() == 1:
        raise KeyError("no sequence parallel group: sequences are not cut (_get_sequence_parallel_world_size() is 1)")
    return _sequence.group()


def _get_max_expert_size() -> int:
    return _topology().expert


def _get_max_expert_size_name() -> str:
    return f"ep_size_{_get_max_expert_size()}"


def _get_max_expert_parallel_group() -> dist.ProcessGroup:
    return _expert.group(_get_max_expert_size_name())


def _get_expert_model_parallel_world_size() -> int:
    """Returns 1, because a single expert is never cut."""
    return 1


def _get_zero_param_intra_parallel_group() -> dist.ProcessGroup | None:
    """Returns the group of `zero_hpz_partition_size`, or None without it."""
    return _intra_node.group() if _zero_param_parallel_is_initialized() else None


def _zero_param_parallel_is_initialized() -> bool:
    return _intra_node.size() > 1


def _clone_world_group() -> dist.ProcessGroup:
    """Returns a separate group of all ranks, always the same one. A collective call."""
    global _clone
    _need_ranks()
    _forget_another_world()
    if _clone is None:
        # pyrefly: ignore[bad-assignment]  # a number only for ranks outside of the group
        _clone = dist.new_group(list(range(dist.get_world_size())))
    return _clone


def group_along(axis: str, *, topology: Topology) -> dist.ProcessGroup:
    """Returns this rank's group along an axis (see `members`) of an engine's mesh. The engine need not be the newest."""
    _need_ranks()
    return _group(members(axis, topology=topology, rank=dist.get_rank(), world_size=dist.get_world_size()))


def group_of_ranks(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Returns a group of these ranks, which is created on first use by a collective call of the ranks."""
    _need_ranks()
    return _group(ranks)


def _group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    _forget_another_world()
    if ranks not in _connected:
        _connected[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _connected[ranks]


def _forget_another_world() -> None:
    global _world, _clone
    if _world is not dist.group.WORLD:
        _world, _clone = dist.group.WORLD, None
        _connected.clear()


def _topology() -> Topology:
    engine = owners.newest()
    return Topology() if engine is None else engine.process.mesh.topology


def _expert_size(group_name: str | None) -> int:
    _need_ranks()
    word, _, size = (group_name or "").rpartition("_")
    if word != "ep_size" or not size.isdecimal():
        raise ValueError(f"group_name={group_name!r}: must be ep_size_N, such as {_get_max_expert_size_name()}")
    return int(size)


def _need_ranks() -> None:
    if not dist.is_initialized():
        raise RuntimeError("no process group yet: call deepspeed.init_distributed() or deepspeed.initialize() before")


# Names that `deepspeed.utils.groups` takes from this module.
__all__ = [
    *("_clone_world_group", "_zero_param_parallel_is_initialized", "initialize"),
    *(name for name in globals() if name.startswith(("get_", "_get_"))),
]
