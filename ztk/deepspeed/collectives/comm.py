"""`deepspeed.comm`: torch.distributed's functions, and a log of their times, which also covers the engine's collectives.

`configure(enabled=True)` or the section `comms_logger` of the configuration enables the log, and `log_summary()` prints it. Logged calls
are synchronous, including asynchronous ones and those on a GPU, so that their times are meaningful. This disables overlap.

Shapes and dtypes are as in torch.distributed: any, equal on all ranks. `all_gather_into_tensor` and `reduce_scatter_tensor` concatenate
the parts of all ranks along the first dimension. dst, src: global ranks.
"""

import functools
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from ztk.core.runtime import Comm
from ztk.core.runtime.comm.nccl import all_gather_single, reduce_scatter_single
from ztk.deepspeed.collectives.log import CommsLog, table
from ztk.deepspeed.start import process
from ztk.deepspeed.tools.timers import now

__all__ = [
    *("P2POp", "ReduceOp", "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "allgather_fn", "barrier"),
    *("batch_isend_irecv", "broadcast", "broadcast_object_list", "comms_logger", "configure"),
    *("destroy_process_group", "gather", "get_all_ranks_from_group", "get_comm_operation_count"),
    *("get_global_rank", "get_local_rank", "get_logged_comm_ops", "get_rank", "get_world_group"),
    *("get_world_size", "has_all_gather_into_tensor", "has_all_reduce_coalesced", "has_coalescing_manager"),
    *("has_comm_data", "has_reduce_scatter_tensor", "inference_all_reduce", "init_distributed"),
    *("initialize_mesh_device", "irecv", "is_available", "is_initialized", "isend", "log_summary"),
    *("monitored_barrier", "new_group", "recv", "reduce", "reduce_scatter", "reduce_scatter_fn"),
    *("reduce_scatter_tensor", "reset_log", "scatter", "send", "watch"),
]
comms_logger = CommsLog()
_watched: weakref.WeakSet[Comm] = weakref.WeakSet()  # communicators of the engines
# Names in the log for the engine's collectives, as DeepSpeed's engine calls them.
_OF_ENGINE = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
_GIVEN = ("tensor", "input_tensor_list", "input_list", "p2p_op_list")  # names of the input arguments


# The log


def configure(
    deepspeed_config: object = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Configures the log. Arguments of None leave a switch unchanged. deepspeed_config: a configuration with a section `comms_logger`."""
    given: dict[str, Any] = {"enabled": enabled, "prof_all": prof_all, "verbose": verbose, "debug": debug}
    if prof_ops is not None:
        given["prof_ops"] = tuple(prof_ops)
    if deepspeed_config is not None:
        # pyrefly: ignore[missing-attribute]  # a mapping or a configuration object with get
        section = deepspeed_config.get("comms_logger", {})
        given = section | {key: value for key, value in given.items() if value is not None}
    for key, value in given.items():
        if value is not None:
            setattr(comms_logger.switches, key, value)
    for engines in _watched:
        _observe(engines)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict | None:
    """Prints all operations by size with counts, times and bandwidths on rank 0. A collective call.

    show_straggler: also prints how long a rank waited for the others. return_dict: returns the numbers on every rank.
    """
    dist.barrier()
    result = comms_logger.result(stragglers=comms_logger.stragglers() if show_straggler else None)
    if dist.get_rank() == 0:
        print(table(result), flush=True)
    dist.barrier()
    return result if return_dict else None


def reset_log() -> None:
    """Removes all logged calls."""
    comms_logger.records.clear()


def has_comm_data() -> bool:
    """Returns whether a call was logged."""
    return bool(comms_logger.records)


def get_comm_operation_count() -> int:
    """Returns the number of logged calls."""
    return comms_logger.count()


def get_logged_comm_ops() -> list[str]:
    """Returns the logged operations."""
    return list(comms_logger.records)


def watch(comm: Comm) -> None:
    """Logs the collectives of an engine from now on, subject to the switches."""
    _watched.add(comm)
    _observe(comm)


def _observe(comm: Comm) -> None:
    def observe(kind: str, label: str, nbytes: int, seconds: float) -> None:
        operation = _OF_ENGINE.get(kind, kind)
        if not comms_logger.switches.wants(operation, prof=False):
            return
        own = nbytes // comm.size if kind in _OF_ENGINE else nbytes  # a slice; the buffer holds the slices of all ranks
        name = f"{operation} | [Caller Func: {label}]" if comms_logger.switches.debug else operation
        comms_logger.append(name, operation=operation, nbytes=own, seconds=seconds, ranks=comm.size)

    comm.observe = observe if comms_logger.switches.enabled else None


def _logged(operation: Callable) -> Callable:
    """Times a call if the log includes it. Like DeepSpeed's functions, the call takes prof, log_name and debug."""
    signature, own_name = inspect.signature(operation), operation.__name__

    @functools.wraps(operation)
    def call(*args, prof: bool = False, log_name: str | None = None, debug: object = None, **kwargs):
        name = log_name or own_name
        if not comms_logger.switches.wants(name, prof=prof):
            return operation(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        ranks = dist.get_world_size(given.get("group"))
        nbytes = _bytes(next((given[key] for key in _GIVEN if key in given), None))
        if comms_logger.switches.debug:
            name = f"{name} | [Caller Func: {sys._getframe(1).f_code.co_name}]"
        start = now()
        result = operation(*args, **kwargs)
        for work in result if isinstance(result, list) else [result]:
            if hasattr(work, "wait"):
                work.wait()
        spent = now() - start
        comms_logger.append(
            name,
            operation=own_name,
            nbytes=nbytes // ranks if own_name.startswith("reduce_scatter") else nbytes,
            seconds=spent,
            ranks=ranks,
        )
        return result

    return call


def _bytes(value: object) -> int:
    match value:
        case Tensor():
            return value.nbytes
        case P2POp():
            return value.tensor.nbytes
        case list() | tuple():
            return sum(map(_bytes, value))
    return 0


# Collectives. Every function also takes prof=True, which logs it alone, log_name and debug. Unchanged from torch.distributed:

all_reduce, reduce, broadcast = map(_logged, (dist.all_reduce, dist.reduce, dist.broadcast))
all_gather, reduce_scatter, all_to_all = map(_logged, (dist.all_gather, dist.reduce_scatter, dist.all_to_all))
gather, scatter, send, recv = map(_logged, (dist.gather, dist.scatter, dist.send, dist.recv))
all_gather_object, broadcast_object_list = map(_logged, (dist.all_gather_object, dist.broadcast_object_list))
barrier, monitored_barrier = map(_logged, (dist.barrier, dist.monitored_barrier))
batch_isend_irecv = _logged(dist.batch_isend_irecv)

is_available, is_initialized, destroy_process_group = dist.is_available, dist.is_initialized, dist.destroy_process_group
get_rank, get_world_size, new_group = dist.get_rank, dist.get_world_size, dist.new_group
init_distributed = process.init_distributed

# With argument names that differ from torch's.


@_logged
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


@_logged
def inference_all_reduce(tensor: Tensor, op=ReduceOp.SUM, group=None):
    """Same as a synchronous `all_reduce`."""
    return dist.all_reduce(tensor, op=op, group=group)


def all_reduce_coalesced(tensors: list[Tensor], op=ReduceOp.SUM, group=None, async_op: bool = False):
    """Runs one all-reduce per tensor."""
    return _together([all_reduce(tensor, op=op, group=group, async_op=async_op) for tensor in tensors], async_op)


@_logged
def reduce_scatter_tensor(output_tensor: Tensor, tensor: Tensor, op=ReduceOp.SUM, group=None, async_op: bool = False):
    """torch.distributed's `reduce_scatter_tensor`."""
    return reduce_scatter_single(output_tensor, tensor, op=op, group=group, async_op=async_op)


def reduce_scatter_fn(output_tensor: Tensor, tensor: Tensor, op=ReduceOp.SUM, group=None, async_op: bool = False):
    """Same as `reduce_scatter_tensor`."""
    return reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op)


@_logged
def all_to_all_single(
    output: Tensor, tensor: Tensor, output_split_sizes=None, input_split_sizes=None, group=None, async_op: bool = False
):
    """torch.distributed's `all_to_all_single`."""
    return dist.all_to_all_single(output, tensor, output_split_sizes, input_split_sizes, group=group, async_op=async_op)


# Point to point


# Never logged, because waiting for one of these could deadlock. prof, log_name and debug are accepted.


def isend(tensor: Tensor, dst: int, group=None, tag: int = 0, prof=False, log_name=None, debug=None):
    """torch.distributed's `isend`."""
    return dist.isend(tensor, dst, group=group, tag=tag)


def irecv(tensor: Tensor, src: int | None = None, group=None, tag: int = 0, prof=False, log_name=None, debug=None):
    """torch.distributed's `irecv`."""
    return dist.irecv(tensor, src, group=group, tag=tag)


class P2POp(dist.P2POp):
    """One message of `batch_isend_irecv`. op: `isend` or `irecv`, of this module or of torch. The other arguments are torch's."""

    def __new__(cls, op: Callable, *args, **kwargs):
        return super().__new__(cls, _torchs(op), *args, **kwargs)

    def __init__(self, op: Callable, *args, **kwargs) -> None:
        super().__init__(_torchs(op), *args, **kwargs)


def _torchs(op: Callable) -> Callable:
    return {isend: dist.isend, irecv: dist.irecv}.get(op, op)


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
