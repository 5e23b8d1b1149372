"""Collectives on GPUs: NCCL's own, in place on the flat buffers."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from ztk.core.runtime.comm.transport import Transport

# torch 2.13 renamed these functions and warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class NcclTransport(Transport):
    """Collectives return at once. `wait()` on the returned work orders the current stream after them.

    Tensors in host memory go over gloo (`connect.backend_of`); their `wait()` blocks the host.

    An all-reduce of gradients is a reduce-scatter and an all-gather over the same slices as the sharded stages use, so that the order of
    summation is the same at every stage. `all_sum`, for activations of tensor parallelism, is NCCL's own.
    """

    blocking = False
    checks_labels = False

    def __init__(self, *, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._size = group.rank(), group.size()

    def all_gather(self, full: Tensor, *, label: str) -> dist.Work:
        own = full.chunk(self._size)[self._rank]
        return all_gather_single(full, own, group=self._group, async_op=True)

    def reduce_scatter(self, full: Tensor, *, out: Tensor, label: str) -> dist.Work:
        return reduce_scatter_single(out, full, group=self._group, async_op=True)

    def all_reduce(self, full: Tensor, *, own: Tensor, label: str) -> dist.Work:
        scattered = self.reduce_scatter(full, out=own, label=label)
        if not full.is_cuda:
            scattered.wait()  # gloo has no stream order, and writes the result in `wait`
        return self.all_gather(full, label=label)

    def all_sum(self, full: Tensor, *, own: Tensor, label: str) -> dist.Work | None:
        return dist.all_reduce(full, group=self._group, async_op=True)

    def all_to_all(self, source: Tensor, *, out: Tensor, label: str) -> dist.Work:
        return dist.all_to_all_single(out, source, group=self._group, async_op=True)

    def all_to_all_uneven(
        self, source: Tensor, *, out: Tensor, send: Sequence[int], receive: Sequence[int], label: str
    ) -> dist.Work:
        return dist.all_to_all_single(out, source, list(receive), list(send), group=self._group, async_op=True)

    def broadcast(self, tensor: Tensor, *, source: int, label: str) -> dist.Work:
        return dist.broadcast(tensor, group_src=source, group=self._group, async_op=True)

    def send(self, tensor: Tensor, *, to: int, label: str) -> dist.Work:
        return dist.isend(tensor, group_dst=to, group=self._group)

    def recv(self, out: Tensor, *, source: int, label: str) -> dist.Work:
        return dist.irecv(out, group_src=source, group=self._group)
