"""`deepspeed.runtime.sequence_parallel.parallel_state_sp`: the groups of ranks that share a sequence, for `initialize(mpu=...)`.

Neighbouring ranks share a sequence. Gradients are sharded over all ranks.
"""

import torch.distributed as dist

from ztk.deepspeed.collectives.groups import group_of_ranks

_size: int | None = None


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Divides all ranks into groups of sequence_parallel_size ranks. May be called again with another size for another model.

    Raises ValueError for a size that does not divide the ranks.
    """
    global _size
    world = dist.get_world_size()
    if sequence_parallel_size < 2 or world % sequence_parallel_size:
        raise ValueError(
            f"sequence_parallel_size={sequence_parallel_size}: must be 2 or more and divide the {world} ranks; 1 needs no groups"
        )
    _size = sequence_parallel_size


def get_sequence_parallel_world_size() -> int:
    """Returns the ranks per sequence. Raises RuntimeError before `initialize_sequence_parallel`, as all of these functions."""
    if _size is None:
        raise RuntimeError("no sequence parallel ranks yet: call initialize_sequence_parallel(n) before")
    return _size


def get_sequence_parallel_rank() -> int:
    """Returns this rank's index among the ranks that share its sequences."""
    return dist.get_rank() % get_sequence_parallel_world_size()


def get_sequence_parallel_group() -> dist.ProcessGroup:
    """Returns the ranks with parts of this rank's sequences. Its first call is a collective call of the group."""
    first = dist.get_rank() - get_sequence_parallel_rank()
    return group_of_ranks(tuple(range(first, first + get_sequence_parallel_world_size())))


def get_sequence_data_parallel_group() -> dist.ProcessGroup | None:
    """Returns all ranks, over which gradients are averaged."""
    return dist.group.WORLD


def get_sequence_data_parallel_world_size() -> int:
    """Returns the number of ranks."""
    return dist.get_world_size()


def get_sequence_data_parallel_rank() -> int:
    """Returns this rank's global index."""
    return dist.get_rank()


get_model_parallel_rank = get_sequence_parallel_rank
get_model_parallel_world_size = get_sequence_parallel_world_size
get_model_parallel_group = get_sequence_parallel_group
