"""`deepspeed.comm`: torch.distributed's functions under DeepSpeed's names.

Shapes and dtypes are as in torch.distributed: any, equal on all ranks. `all_gather_into_tensor` and `reduce_scatter_tensor` concatenate
the parts of all ranks along the first dimension. dst, src: global ranks.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from ztk.core.runtime.comm.nccl import all_gather_single, reduce_scatter_single
from ztk.deepspeed.names.table import GONE
from ztk.deepspeed.start import process

__all__ = [
    *("P2POp", "ReduceOp", "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "allgather_fn", "barrier"),
    *("batch_isend_irecv", "broadcast", "broadcast_object_list", "destroy_process_group", "gather"),
    *("get_all_ranks_from_group", "get_global_rank", "get_local_rank", "get_rank", "get_world_group"),
    *("get_world_size", "has_all_gather_into_tensor", "has_all_reduce_coalesced", "has_coalescing_manager"),
    *("has_reduce_scatter_tensor", "inference_all_reduce", "init_distributed", "initialize_mesh_device"),
    *("irecv", "is_available", "is_initialized", "isend", "monitored_barrier", "new_group", "recv", "reduce"),
    *("reduce_scatter", "reduce_scatter_fn", "reduce_scatter_tensor", "scatter", "send"),
]

# Unchanged from torch.distributed:

all_reduce, reduce, broadcast = dist.all_reduce, dist.reduce, dist.broadcast
all_gather, reduce_scatter, all_to_all = dist.all_gather, dist.reduce_scatter, dist.all_to_all
gather, scatter, send, recv, isend, irecv = dist.gather, dist.scatter, dist.send, dist.recv, dist.isend, dist.irecv
all_gather_object, broadcast_object_list = dist.all_gather_object, dist.broadcast_object_list
barrier, monitored_barrier, batch_isend_irecv, P2POp = (
    dist.barrier,
    dist.monitored_barrier,
    dist.batch_isend_irecv,
    dist.P2POp,
)

is_available, is_initialized, destroy_process_group = dist.is_available, dist.is_initialized, dist.destroy_process_group
get_rank, get_world_size, new_group = dist.get_rank, dist.get_world_size, dist.new_group
init_distributed = process.init_distributed

# With argument names that differ from torch's.


def all_gather_into_tensor(output_tensor: Tensor, tensor: Tensor, group=None, async_op: bool = False):
    """torch.distributed's `all_gather_into_tensor`."""
    return all_gather_single(output_tensor, tensor, group=group, async_op=async_op)


def allgather_fn(output_tensor: Tensor, input_tensor: Tensor, group=None, async_op: bool = False):
    """Same as `all_gather_into_tensor`."""
    return all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def all_gather_coalesced(output_tensors: list[Tensor], input_tensors: list[Tensor], group=None, async_op: bool = False):
    """Runs one all-gather per pair of tensors."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    return _together([all_gather_into_tensor(o, i, group=group, async_op=async_op) for o, i in pairs], async_op)


def inference_all_reduce(tensor: Tensor, op=ReduceOp.SUM, group=None):
    """Same as a synchronous `all_reduce`."""
    return dist.all_reduce(tensor, op=op, group=group)


def all_reduce_coalesced(tensors: list[Tensor], op=ReduceOp.SUM, group=None, async_op: bool = False):
    """Runs one all-reduce per tensor."""
    return _together([all_reduce(tensor, op=op, group=group, async_op=async_op) for tensor in tensors], async_op)


def reduce_scatter_tensor(output_tensor: Tensor, tensor: Tensor, op=ReduceOp.SUM, group=None, async_op: bool = False):
    """torch.distributed's `reduce_scatter_tensor`."""
    return reduce_scatter_single(output_tensor, tensor, op=op, group=group, async_op=async_op)


def reduce_scatter_fn(output_tensor: Tensor, tensor: Tensor, op=ReduceOp.SUM, group=None, async_op: bool = False):
    """Same as `reduce_scatter_tensor`."""
    return reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op)


def all_to_all_single(
    output: Tensor, tensor: Tensor, output_split_sizes=None, input_split_sizes=None, group=None, async_op: bool = False
):
    """torch.distributed's `all_to_all_single`."""
    return dist.all_to_all_single(output, tensor, output_split_sizes, input_split_sizes, group=group, async_op=async_op)


class _Works:
    """Several works that are waited for together."""

    def __init__(self, works: list) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _together(works: list, async_op: bool) -> _Works | None:
    return _Works(works) if async_op else None


# Ranks and groups


def get_local_rank() -> int:
    """Returns this rank's index on its machine, as set by the launcher."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", 0)))


def get_world_group():
    """Returns the group of all ranks."""
    return dist.group.WORLD


def get_global_rank(group=None, group_rank: int = 0) -> int:
    """Returns the global rank of `group_rank` in `group`. group defaults to all ranks."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group=None) -> list[int]:
    """Returns the global ranks of `group`, which defaults to all ranks."""
    return dist.get_process_group_ranks(group)


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]):
    """Returns torch's device mesh over all ranks."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return dist.device_mesh.init_device_mesh(kind, mesh_shape, mesh_dim_names=mesh_dim_names)


def has_all_gather_into_tensor() -> bool:
    """Returns True: torch has this function, and all functions that the checks below ask about."""
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_coalescing_manager = has_all_gather_into_tensor


def __getattr__(name: str) -> object:
    """Raises AttributeError, with the way for the functions of DeepSpeed's log."""
    way = GONE.get(f"deepspeed.comm.{name}", "docs/deepspeed.md lists the supported names")
    raise AttributeError(f"deepspeed.comm.{name}: not offered by ztk; {way}")
